/* The error record of each thread, and a second one that nobody reads. */
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define TEXT_BYTES 1024

static _Thread_local struct {
    int status;
    size_t length;
    char text[TEXT_BYTES];
} records[2];

static _Thread_local bool aside;

#define record records[aside]

void ekv_error_aside(bool on) { aside = on; }

void ekv_error_clear(void)
{
    record.status = EKV_OK;
    record.length = 0;
    record.text[0] = '\0';
}

int ekv_error_status(void) { return record.status; }

static void append(const char *format, va_list arguments)
{
    int written = vsnprintf(record.text + record.length, TEXT_BYTES - record.length, format, arguments);
    if (written > 0) {
        record.length += (size_t)written;
        if (record.length >= TEXT_BYTES)
            record.length = TEXT_BYTES - 1;
    }
}

static void appendf(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void appendf(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    append(format, arguments);
    va_end(arguments);
}

/* The first failure decides the status; what fails after it is an undo step. */
static void begin_failure(int status)
{
    if (record.status == EKV_OK)
        record.status = status;
    else
        appendf("; while undoing: ");
}

int ekv_error(int status, const char *format, ...)
{
    va_list arguments;
    begin_failure(status);
    va_start(arguments, format);
    append(format, arguments);
    va_end(arguments);
    return status;
}

int ekv_fail(const ekv_device *device, const char *call, int code, uint64_t address, uint64_t size)
{
    const ekv_driver *driver = device->driver;
    begin_failure(code == driver->out_of_memory_code ? EKV_OUT_OF_MEMORY : EKV_DRIVER_FAILED);
    appendf("%s: %s failed: %s (%d), device %d", driver->name, call, driver->error_name(code), code, device->ordinal);
    if (address)
        appendf(", address 0x%llx", (unsigned long long)address);
    if (size)
        appendf(", %llu bytes", (unsigned long long)size);
    return code;
}

ekv_error_mark ekv_error_get_mark(void)
{
    return (ekv_error_mark){record.status, record.length};
}

void ekv_error_rewind(ekv_error_mark mark, char *text, size_t text_bytes)
{
    if (text && text_bytes)
        snprintf(text, text_bytes, "%s", record.text + mark.length);
    record.status = mark.status;
    record.length = mark.length;
    record.text[mark.length] = '\0';
}

int ekv_last_error(char *text, size_t text_bytes)
{
    if (text && text_bytes)
        snprintf(text, text_bytes, "%s", record.text);
    return record.status;
}
