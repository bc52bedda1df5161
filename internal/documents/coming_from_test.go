package documents

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

// comingFrom is the page whose SQL has tests of its own.
const comingFrom = "docs/coming-from.md"

// docs/coming-from.md gives the keys by which Go takes the locks of programs that hash names
// themselves.
func TestRawKeysAreTheLocksOfProgramsThatHash(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	old, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer old.Rollback(context.Background())
	for _, name := range []string{"invoice:42", "invoice:45"} {
		for lock, key := range map[string]string{
			"hashtext('" + name + "')":                                     pgxlock.RawKey(testkit.Query[int64](t, db, "select hashtext('"+name+"')::bigint")),
			fmt.Sprint(crc32.ChecksumIEEE([]byte(name))&0x7fffffff, ", 0"): pgxlock.RawKey2(int32(crc32.ChecksumIEEE([]byte(name))&0x7fffffff), 0),
		} {
			try := func() error {
				return pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
					return pgxlock.LockTx(t.Context(), tx, key, pgxlock.NoWait)
				})
			}
			if err := try(); err != nil {
				t.Errorf("%s, free: %v", lock, err)
			}
			if _, err := old.Exec(t.Context(), "select pg_advisory_xact_lock("+lock+")"); err != nil {
				t.Fatal(err)
			}
			if err := try(); !errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("%s, locked: %v", lock, err)
			}
		}
	}
}

// The statements of a ShedLock provider, as docs/coming-from.md gives them.
func TestShedLocksCallsAreThoseOfALease(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	for statement := range strings.SplitSeq(strings.TrimSpace(snippetWith(t, comingFrom, "sql", "lockAtMostFor")), "\n") {
		if !testkit.Query[bool](t, db, statement) {
			t.Errorf("false: %s", statement)
		}
	}
}

// A program that takes both locks excludes those that take one of them, so a fleet
// can change over in two steps, and not in one.
func TestFleetChangesOverFromShedLockInTwoSteps(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, `create table shedlock (name varchar(64) not null, lock_until timestamp not null,
		locked_at timestamp not null, locked_by varchar(255) not null, primary key (name))`) // as ShedLock's README has it
	take, giveBack, _ := strings.Cut(snippetWith(t, comingFrom, "sql", "INSERT INTO shedlock"), ";")
	locks := testkit.NewLocker(t, db, nil)

	// try takes the locks of one kind of program, or none, and returns what gives
	// them back.
	const oldLock, newLock, both = 1, 2, 3
	try := func(kind int, id string) (release func(), ok bool) {
		undo := func() {}
		if kind&oldLock != 0 {
			if db.Exec(t, strings.ReplaceAll(take, "go-1:7f3a", id)).RowsAffected() == 0 {
				return nil, false
			}
			undo = func() { db.Exec(t, strings.ReplaceAll(giveBack, "go-1:7f3a", id)) }
		}
		if kind&newLock == 0 {
			return undo, true
		}
		lock, err := locks.TryAcquire(t.Context(), "nightly")
		if errors.Is(err, pgxlock.ErrNotAcquired) {
			undo()
			return nil, false
		}
		if err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := lock.Release(t.Context()); err != nil {
				t.Error(err)
			}
			undo()
		}, true
	}
	for _, holder := range []int{oldLock, newLock, both} {
		for _, other := range []int{oldLock, newLock, both} {
			release, ok := try(holder, "holder")
			if !ok {
				t.Fatalf("program %d does not get what is free", holder)
			}
			second, together := try(other, "other")
			if together {
				second()
			}
			if excluded := holder&other != 0; together == excluded {
				t.Errorf("programs %d and %d hold it together: %t", holder, other, together)
			}
			release()
		}
	}
}

// What docs/coming-from.md says that callers of the copied functions may notice.
// What takes two transactions to see is in internal/sqltest.
func TestUpgradeChangesWhatTheDocumentSays(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	seed, err := os.ReadFile("testdata/seed.sql")
	if err != nil {
		t.Fatal(err)
	}
	before, after := pgtest.New(t), pgtest.New(t)
	for _, db := range []*pgtest.DB{before, after} {
		db.Exec(t, string(seed))
		db.Exec(t, "select acquire_lock('held', 'old caller', 600)")
	}
	if err := migrations.Up(t.Context(), after.Pool, nil); err != nil {
		t.Fatal(err)
	}
	const (
		expire  = "update distributed_locks set expires_at = now() - interval '1 minute', acquired_at = now() - interval '2 minutes'; "
		first   = `select acquire_lock('k', 'a', 60, '{"v": 1}'); `
		refused = "22023"
	)
	for what, test := range map[string]struct{ do, ask, before, after string }{
		"what was held stays held":     {"", "acquire_lock('held', 'somebody else')", "false", "false"},
		"release after the expiry":     {first + expire, "release_lock('k', 'a')", "true", "false"},
		"the row goes all the same":    {first + expire + "select release_lock('k', 'a')", "not exists (select from distributed_locks where lock_name = 'k')", "true", "true"},
		"metadata of the same holder":  {first + `select acquire_lock('k', 'a', 60, '{"v": 2}')`, "select metadata->>'v' from distributed_locks where lock_name = 'k'", "1", "2"},
		"no metadata, the same holder": {first + `select acquire_lock('k', 'a')`, "select metadata->>'v' from distributed_locks where lock_name = 'k'", "1", "1"},
		"acquired_at of the same":      {first + "update distributed_locks set acquired_at = now() - interval '1 hour'; select acquire_lock('k', 'a')", "select now() - acquired_at > '1 minute' from distributed_locks where lock_name = 'k'", "false", "true"},
		"metadata after a take-over":   {first + expire + `select acquire_lock('k', 'b', 60, '{"v": 2}')`, "select metadata->>'v' from distributed_locks where lock_name = 'k'", "2", "2"},
		"a TTL of 0":                   {"", "acquire_lock('k', 'a', 0)", "true", refused},
		"an empty name":                {"", "acquire_lock('', 'a')", "true", refused},
		"a holder that is NULL":        {"", "acquire_lock('k', null)", "23502", refused},
		"a holder that begins with *":  {"", "acquire_lock('k', '*a')", "true", refused},
		"two that share a holder id":   {first, "acquire_lock('k', 'a')", "true", "true"},
		"the index":                    {"", "to_regclass('idx_locks_expires') is not null", "true", "false"},
		"the columns of select *":      {"", "select count(*) from pg_attribute where attrelid = 'distributed_locks'::regclass and attnum > 0", "5", "6"},
	} {
		for db, want := range map[*pgtest.DB]string{before: test.before, after: test.after} {
			db.Exec(t, "delete from distributed_locks where lock_name <> 'held'")
			db.Exec(t, test.do)
			var got string
			err := db.Pool.QueryRow(t.Context(), "select ("+test.ask+")::text").Scan(&got)
			if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
				got = pgErr.Code
			} else if err != nil {
				t.Fatal(err)
			}
			if got != want {
				t.Errorf("%s: %s, want %s (upgraded: %t)", what, got, want, db == after)
			}
		}
		for _, db := range []*pgtest.DB{before, after} {
			db.Exec(t, "update distributed_locks set expires_at = now() + interval '10 minutes' where lock_name = 'held'")
		}
	}
}
