package observe

import (
	"log/slog"
	"time"
)

// LockAttrs returns the attributes of a log record that name a lock.
func LockAttrs(kind, key string, shared bool, label string) []slog.Attr {
	attrs := []slog.Attr{slog.String("key", key), slog.String("kind", kind)}
	if shared {
		attrs = append(attrs, slog.String("mode", "shared"))
	}
	if label != "" {
		attrs = append(attrs, slog.String("label", label))
	}
	return attrs
}

// AppendKnown appends a number unless it is 0, for unknown.
func AppendKnown(attrs []slog.Attr, name string, n int64) []slog.Attr {
	if n == 0 {
		return attrs
	}
	return append(attrs, slog.Int64(name, n))
}

// AppendTime appends a time unless it is zero, for unknown.
func AppendTime(attrs []slog.Attr, name string, at time.Time) []slog.Attr {
	if at.IsZero() {
		return attrs
	}
	return append(attrs, slog.Time(name, at))
}
