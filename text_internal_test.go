package pgxlock

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lease"
)

// Any role that may lock chooses names, and what is printed of them goes to terminals and logs.
func TestTextsOfOtherCallersArePrintedInOneLineWithoutControlCharacters(t *testing.T) {
	t.Parallel()
	const foreign = "pod-1\n2026-11-25 released by admin\x1b]0;owned\a\x1b[2J\u202egnp.exe\u2066\u200f\xff\x7f"
	text := func(v any) string {
		var b bytes.Buffer
		slog.New(slog.NewTextHandler(&b, nil)).Warn("lock", "value", v)
		return strings.TrimSuffix(b.String(), "\n")
	}
	holder := Holder{
		Key: foreign, Kind: KindLease, ID: foreign, Metadata: foreign, Application: foreign, Role: foreign, Client: foreign, Label: foreign,
		State: StateLive, EvictedBy: foreign, EvictionReason: foreign,
	}
	expired := holder
	expired.State = StateExpired
	busy := &Error{Op: "acquire", Key: foreign, Kind: KindLease, Holder: foreign, RetryAfter: time.Second, Err: ErrNotAcquired}
	server := &pgconn.PgError{Severity: "ERROR", Code: "P0001", Message: foreign}
	event := Event{Op: EventEvicted, Key: foreign, Kind: KindLease, Holder: foreign, EvictionReason: foreign, Err: busy}
	for name, got := range map[string]string{
		"Holder.String":                 holder.String(),
		"Holder.String of an old one":   expired.String(),
		"Error.Error":                   busy.Error(),
		"Error.Error of the server":     fail("renew", "k", KindLease, server).Error(),
		"Error.Error around another":    (&Error{Op: "hold", Err: fmt.Errorf("%w: %w", busy, server)}).Error(),
		"Error.Error of a lost lock":    (&Error{Op: "lock", Key: "k", Err: &hold.LostError{Why: errors.New(foreign)}}).Error(),
		"LostError.Error":               (&hold.LostError{Why: errors.New(foreign)}).Error(),
		"a log record with a Holder":    text(holder),
		"a log record with an Event":    text(event),
		"a log record with an error":    text(server),
		"a log record with a LostError": text(&hold.LostError{Why: server}),
	} {
		if i := strings.IndexFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 || !utf8.ValidString(got) {
			t.Errorf("%s: %q", name, got)
		}
	}
	if holder.ID != foreign || busy.Holder != foreign {
		t.Error("the fields are changed")
	}
}

func TestTextsOfOrdinaryNamesAreNotQuoted(t *testing.T) {
	t.Parallel()
	h := Holder{Key: "Grüße", Kind: KindLease, ID: `web-1 "blue" 世界`, State: StateLive, EvictedBy: `ops\admin`, EvictionReason: "it hangs"}
	if got, want := h.String(), `lease "Grüße" held by web-1 "blue" 世界, being evicted by ops\admin: it hangs`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	e := &Error{Op: "acquire", Key: "k", Holder: `web-1 "blue" 世界`, Err: ErrNotAcquired}
	if got, want := e.Error(), `pgxlock: acquire "k": not acquired (held by web-1 "blue" 世界)`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestErrorSaysThatALockIsSharedAndForHowLongInRoundNumbers(t *testing.T) {
	t.Parallel()
	for left, want := range map[time.Duration]string{
		0:                         "",
		1234567 * time.Nanosecond: " for up to 2ms",
		9876 * time.Millisecond:   " for up to 9.876s",
		26059 * time.Millisecond:  " for up to 27s",
	} {
		e := &Error{Op: "acquire", Key: "k", Holder: lease.SharedHolder, RetryAfter: left, Err: ErrNotAcquired}
		if got, want := e.Error(), `pgxlock: acquire "k": not acquired (held by callers that share it`+want+")"; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestErrorsCutLongArgumentsAndStayUTF8(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("世", 10<<20/3)
	locks := NewMemoryLocker()
	defer locks.Close(context.Background())
	tryAcquire := func(key string, opts ...AcquireOption) error {
		_, err := locks.TryAcquire(t.Context(), key, opts...)
		return err
	}
	_, holders := locks.Holders(t.Context(), long)
	_, owner := NewLeaseLocker(nil, &LeaseConfig{Owner: long})
	_, option := ClaimSQLTx(t.Context(), new(sql.Tx), "k", Schema(long))
	_, schema := NewLeaseLocker(nil, &LeaseConfig{Schema: long})
	for name, err := range map[string]error{
		"a key":           tryAcquire(long),
		"a raw key":       tryAcquire("\x00#" + long),
		"a key of Holder": holders,
		"metadata":        tryAcquire("k", Metadata(long)),
		"a schema option": option,
		"an owner":        owner,
		"a schema":        schema,
		"a holder":        &Error{Op: "acquire", Key: "k", Holder: long, Err: ErrNotAcquired},
		"a reason":        &Error{Op: "lock", Key: "k", Err: fmt.Errorf("%w: %s", ErrLost, long)},
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
			continue
		}
		if text := err.Error(); len(text) > 32<<10 || !utf8.ValidString(text) {
			t.Errorf("%s: %d bytes, %.100q", name, len(text), text)
		}
	}
	if text := (Holder{Key: long}).String(); len(text) > 4<<10 {
		t.Errorf("%d bytes", len(text))
	}
}

// FuzzMetadata checks that what is stored is what was given, and refuses the rest without repeating it.
func FuzzMetadata(f *testing.F) {
	for _, text := range []string{"", "step 3", `{"a": "b"}`, "<&>\u2028\u009b", "\xff", "\x00", strings.Repeat("\x01", maxMetadata/6), strings.Repeat("x", maxMetadata)} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var o options
		if err := Metadata(text).apply(&o); err != nil {
			if len(err.Error()) > 200 || o.Metadata != nil {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		var stored string
		if err := json.Unmarshal([]byte(*o.Metadata), &stored); err != nil || stored != text || len(*o.Metadata) > maxMetadata || strings.Contains(*o.Metadata, "\n") {
			t.Errorf("%q is stored as %s: %v", text, *o.Metadata, err)
		}
	})
}
