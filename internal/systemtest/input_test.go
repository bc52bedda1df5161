package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// unconnected returns a pool that must never be asked to connect.
func unconnected(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return pgtest.Pool(t, "host=127.0.0.1 port=1 user=nobody dbname=nothing sslmode=disable", func(c *pgxpool.Config) {
		c.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
			t.Error("something was sent")
			return nil, errors.New("no server")
		}
	})
}

// wantRefused checks that bad input ended in an *Error with that operation whose
// one line says what was wrong.
func wantRefused(t *testing.T, err error, op string, words ...string) {
	t.Helper()
	wantRefusedBy(t, pgxlock.KindLease, err, op, words...)
}

func wantRefusedBy(t *testing.T, kind pgxlock.Kind, err error, op string, words ...string) {
	t.Helper()
	refused, ok := err.(*pgxlock.Error) //nolint:errorlint // this is what methods return, not something inside it
	if !ok || refused.Op != op || refused.Kind != kind || refused.Err == nil {
		t.Fatalf("%#v, want an *Error of %q", err, op)
	}
	for _, sentinel := range []error{
		pgxlock.ErrNotAcquired, pgxlock.ErrLost, pgxlock.ErrReleased, pgxlock.ErrClosed, pgxlock.ErrDeadlock,
		pgxlock.ErrStaleSnapshot, pgxlock.ErrReadOnly, pgxlock.ErrSchema,
	} {
		if errors.Is(err, sentinel) {
			t.Errorf("%v matches %v", err, sentinel)
		}
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("the message does not say %q: %v", word, err)
		}
	}
	if strings.ContainsAny(err.Error(), "\r\n\x00") || !strings.HasPrefix(err.Error(), "pgxlock: "+op) {
		t.Errorf("not one line of ours: %q", err.Error())
	}
}

func TestBadConfigurationIsRefusedByName(t *testing.T) {
	t.Parallel()
	const s = time.Second
	for name, test := range map[string]struct {
		cfg  pgxlock.LeaseConfig
		says string
	}{
		"a durability that is none":   {pgxlock.LeaseConfig{Durability: pgxlock.Async + 1}, "LeaseConfig.Durability"},
		"a negative durability":       {pgxlock.LeaseConfig{Durability: -1}, "LeaseConfig.Durability"},
		"a short TTL":                 {pgxlock.LeaseConfig{TTL: s - 1}, "LeaseConfig.TTL"},
		"a negative TTL":              {pgxlock.LeaseConfig{TTL: -s}, "LeaseConfig.TTL"},
		"a TTL for ever":              {pgxlock.LeaseConfig{TTL: 101 * 365 * 24 * time.Hour}, "LeaseConfig.TTL"},
		"rare renewals":               {pgxlock.LeaseConfig{TTL: 3 * s, Renew: s + 1}, "LeaseConfig.Renew"},
		"rarer than the default":      {pgxlock.LeaseConfig{Renew: 10*s + 1}, "LeaseConfig.Renew"},
		"negative renewals":           {pgxlock.LeaseConfig{Renew: -1}, "LeaseConfig.Renew"},
		"a storm of renewals":         {pgxlock.LeaseConfig{Renew: time.Millisecond}, "LeaseConfig.Renew"},
		"a margin below a tenth":      {pgxlock.LeaseConfig{TTL: 10 * s, Margin: s - 1}, "LeaseConfig.Margin"},
		"a margin above a third":      {pgxlock.LeaseConfig{TTL: 9 * s, Margin: 3*s + 1}, "LeaseConfig.Margin"},
		"a negative margin":           {pgxlock.LeaseConfig{Margin: -s}, "LeaseConfig.Margin"},
		"a reserved owner":            {pgxlock.LeaseConfig{Owner: "*me"}, "LeaseConfig.Owner"},
		"a long owner":                {pgxlock.LeaseConfig{Owner: strings.Repeat("o", 300)}, "LeaseConfig.Owner"},
		"an owner of 201 characters":  {pgxlock.LeaseConfig{Owner: strings.Repeat("ö", 201)}, "LeaseConfig.Owner"},
		"an owner that is not UTF-8":  {pgxlock.LeaseConfig{Owner: "me\xff"}, "LeaseConfig.Owner"},
		"an owner with a zero byte":   {pgxlock.LeaseConfig{Owner: "me\x00"}, "LeaseConfig.Owner"},
		"a reserved owner of 2 lines": {pgxlock.LeaseConfig{Owner: "*me\nand you"}, "LeaseConfig.Owner"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locks, err := pgxlock.NewLeaseLocker(unconnected(t), &test.cfg)
			wantRefused(t, err, "new", test.says)
			if locks != nil {
				t.Error("there is a Locker all the same")
			}
		})
	}
	_, err := pgxlock.NewLeaseLocker(nil, nil)
	wantRefused(t, err, "new", "the pool is nil", "pgxpool.New")
}

func TestBadArgumentIsRefusedBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	locks, err := pgxlock.NewLeaseLocker(unconnected(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer locks.Close(t.Context())
	work := func(context.Context, *pgxlock.Lock) error {
		t.Error("the work was called")
		return nil
	}
	for name, test := range map[string]struct {
		key  string
		opts []pgxlock.AcquireOption
		says string
	}{
		"an empty key":                {"", nil, "the key is empty"},
		"a key of 256 characters":     {strings.Repeat("k", 256), nil, "the key has 256 characters"},
		"256 characters of 4 bytes":   {strings.Repeat("🔒", 256), nil, "the key has 256 characters"},
		"a key with a zero byte":      {"a\x00b", nil, "the key contains a zero byte"},
		"a key that is not UTF-8":     {"a\xff", nil, "the key is not valid UTF-8"},
		"an invalid key of two lines": {"a\n\xff", nil, "the key is not valid UTF-8"},
		"a short TTL":                 {"k", []pgxlock.AcquireOption{pgxlock.TTL(time.Second - 1)}, "TTL is"},
		"no TTL":                      {"k", []pgxlock.AcquireOption{pgxlock.TTL(0)}, "TTL is"},
		"a negative TTL":              {"k", []pgxlock.AcquireOption{pgxlock.TTL(-time.Minute)}, "TTL is"},
		"a TTL for ever":              {"k", []pgxlock.AcquireOption{pgxlock.TTL(1<<63 - 1)}, "TTL is"},
		"metadata not UTF-8":          {"k", []pgxlock.AcquireOption{pgxlock.Metadata("\xff")}, "Metadata must be valid UTF-8"},
		"metadata with a zero byte":   {"k", []pgxlock.AcquireOption{pgxlock.Metadata("\x00")}, "Metadata must be valid UTF-8"},
		"too much metadata":           {"k", []pgxlock.AcquireOption{pgxlock.Metadata(strings.Repeat("m", 64<<10))}, "Metadata has 65538 bytes"},
		"too much when quoted":        {"k", []pgxlock.AcquireOption{pgxlock.Metadata(strings.Repeat(`"`, 33<<10))}, "Metadata has"},
		"an unknown mode":             {"k", []pgxlock.AcquireOption{pgxlock.Mode(7)}, "Mode(7) is not a mode; use Exclusive or Shared"},
		"a nil option":                {"k", []pgxlock.AcquireOption{nil}, "an option is nil"},
		"a nil option among others":   {"k", []pgxlock.AcquireOption{pgxlock.NoWait, nil}, "an option is nil"},
		"a bad option that a later one overrules": {
			"k", []pgxlock.AcquireOption{pgxlock.TTL(1), pgxlock.TTL(time.Minute)}, "TTL is",
		},
	} {
		for method, call := range map[string]func() error{
			"Acquire":    func() error { _, err := locks.Acquire(t.Context(), test.key, test.opts...); return err },
			"TryAcquire": func() error { _, err := locks.TryAcquire(t.Context(), test.key, test.opts...); return err },
			"Do":         func() error { return locks.Do(t.Context(), test.key, work, test.opts...) },
			"TryDo":      func() error { _, err := locks.TryDo(t.Context(), test.key, work, test.opts...); return err },
		} {
			t.Run(name+", "+method, func(t *testing.T) { wantRefused(t, call(), "acquire", test.says) })
		}
	}

	wantRefused(t, locks.Do(t.Context(), "k", nil), "acquire", "fn is nil")
	ran, err := locks.TryDo(t.Context(), "k", nil)
	wantRefused(t, err, "acquire", "fn is nil")
	if ran {
		t.Error("a nil function was called")
	}
}

// The bounds themselves are allowed.
func TestLargestInputsWorkEndToEnd(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	owner := strings.Repeat("ö", 200)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: 30 * time.Minute, Renew: 10 * time.Minute, Margin: 10 * time.Minute, Owner: owner})
	for _, key := range []string{strings.Repeat("🔒", 255), strings.Repeat("é", 255), "a\nb", " ", `"'\%_$1`, "e\u0301"} {
		useLock(t, locks, db.Pool, key)
		for lost := true; lost; { // again where this machine stands still for longer than a second
			lock, err := acquireInTime(t.Context(), locks, key, pgxlock.TTL(time.Second))
			if err != nil {
				t.Fatal(err)
			}
			if got := testkit.Rows(t, db); len(got) != 1 || got[key] != lock.Holder() || !strings.HasPrefix(lock.Holder(), owner) || lock.Key() != key {
				t.Errorf("%q: held: %q", key, got)
			}
			err = lock.Release(t.Context())
			if lost = errors.Is(err, pgxlock.ErrLost); err != nil && !lost {
				t.Error(err)
			}
		}
	}
}

func TestMetadataIsStoredAsAJSONString(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, nil)
	for _, metadata := range []string{
		"pod-7", "", `{"not": "an object"}`, `quote " backslash \ <&>`, "two\nlines\t\u2028", "ünï 🔒 \u007f\u0001", "null",
		strings.Repeat("m", 64<<10-2), strings.Repeat("🔒", 1000),
	} {
		lock := testkit.Acquire(t, locks, "k", pgxlock.Metadata(metadata))
		if kind := testkit.Query[string](t, db, "select jsonb_typeof(metadata) from distributed_locks"); kind != "string" {
			t.Errorf("%.20q is stored as %s", metadata, kind)
		}
		if got := testkit.Query[string](t, db, "select metadata #>> '{}' from distributed_locks"); got != metadata {
			t.Errorf("%.20q is read back as %.20q", metadata, got)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	testkit.Acquire(t, locks, "without")
	if got := testkit.Query[string](t, db, "select metadata::text from distributed_locks where lock_name = 'without'"); got != "{}" {
		t.Errorf("without metadata: %s", got)
	}
}

func TestEntryThatTheServerRefusesFailsNoOtherOfItsBatch(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	// A row that a person wrote: no token can be greater.
	db.Exec(t, `insert into distributed_locks (lock_name, holder_id, expires_at, fencing_token)
		values ('spoiled', 'a person', now() - interval '1 minute', $1)`, int64(1)<<62)
	asked := &testkit.Counter{Sql: testkit.AcquireSQL}
	p, through := testkit.Proxied(t, db, func(c *pgxpool.Config) { c.ConnConfig.Tracer = asked })
	locks := testkit.NewLocker(t, through, nil)

	// While the first request is under way the others gather.
	held := p.Arm(t, testkit.HoldReply, testkit.AcquireSQL)
	const n = 50
	errs := make(chan error, n+1)
	var spoiled error
	var calls sync.WaitGroup
	calls.Go(func() { _, err := locks.Acquire(t.Context(), "first"); errs <- err })
	held.Happened(t)
	calls.Go(func() { _, spoiled = locks.Acquire(t.Context(), "spoiled") })
	for i := range n {
		calls.Go(func() { _, err := locks.Acquire(t.Context(), fmt.Sprint("key:", i)); errs <- err })
	}
	pgtest.Until(t, "all requests stand in the queue", func() bool { return gathered(t.Name()) == n+2 })
	held.Resume()
	calls.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Errorf("an entry without fault: %v", err)
		}
	}
	if !errors.Is(spoiled, pgxlock.ErrSchema) || !strings.Contains(spoiled.Error(), `"spoiled"`) {
		t.Errorf("the spoiled entry: %v, want ErrSchema and its key", spoiled)
	}
	statements, entries, _ := asked.Counts()
	if entries < statements+n {
		t.Errorf("%d entries in %d statements: there was no batch to spoil", entries, statements)
	}
	if got := testkit.Rows(t, db); len(got) != n+2 || got["spoiled"] != "a person" {
		t.Errorf("%d rows, want %d; the spoiled one is held by %q", len(got), n+2, got["spoiled"])
	}
}

// gathered returns how many goroutines of that test wait for the answer to a
// request.
func gathered(test string) (n int) {
	buf := make([]byte, 8<<20)
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(stack, "[select") && strings.Contains(stack, "lease.(*Table).Try(") && strings.Contains(stack, test) {
			n++
		}
	}
	return n
}
