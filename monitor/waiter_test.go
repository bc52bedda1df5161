package monitor_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

// Any role that may lock chooses names, and what is printed of them goes to terminals and logs.
func TestWaiterIsPrintedInOneLineWithoutControlCharacters(t *testing.T) {
	t.Parallel()
	const foreign = "pod-1\n2026-11-25 released by admin\x1b]0;owned\a\x1b[2J\u202egnp.exe\u2066\u200f\xff\x7f"
	waiter := monitor.Waiter{Key: foreign, Kind: pgxlock.KindAdvisory, Owner: foreign, Holds: []string{foreign}, Label: foreign, Since: time.Now(), Behind: 1}
	var record bytes.Buffer
	slog.New(slog.NewTextHandler(&record, nil)).Warn("lock", "value", waiter)
	for name, got := range map[string]string{"String": waiter.String(), "a log record": strings.TrimSuffix(record.String(), "\n")} {
		if i := strings.IndexFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 || !utf8.ValidString(got) {
			t.Errorf("%s: %q", name, got)
		}
	}
}
