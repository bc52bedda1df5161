package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// soakKeys name nine locks: the last two keys are the first one's other names.
var soakKeys = []string{
	"a", "b", "c", "d", "e", "f", "g", pgxlock.RawKey(-1), pgxlock.RawKey2(-1, 7),
	pgxlock.RawKey(pgxlock.AdvisoryID("a")), "a",
}

// sameLock returns one key for all names of a lock.
func sameLock(key string) string {
	if key == soakKeys[9] {
		return "a"
	}
	return key
}

// A ledger knows who believes in which lock, in the order of the grants.
type ledger struct {
	t          *testing.T
	terminates bool // sessions end, so that one Locker may be granted what another one has just lost

	tokens bool // each lock has one

	mu       sync.Mutex
	held     map[string]map[*pgxlock.Lock]entry
	greatest map[string]int64 // token of a key
}

type entry struct {
	locks  *pgxlock.Locker
	shared bool
}

// grant enters a lock, and looks who else believes in it.
func (b *ledger) grant(lock *pgxlock.Lock, e entry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := sameLock(lock.Key())
	for other, o := range b.held[key] {
		if (o.shared && e.shared) || (b.terminates && o.locks != e.locks) {
			continue
		}
		if other.Err() == nil && lock.Err() == nil {
			b.t.Errorf("%q is held twice: by %s (shared: %t) and by %s (shared: %t)", key, other.Holder(), o.shared, lock.Holder(), e.shared)
		}
	}
	if b.tokens {
		token, before := lock.Token(), b.greatest[key]
		if token <= 0 || token <= before && !e.shared && !b.terminates { // a reader may come late to this
			b.t.Errorf("%q has token %d after %d (shared: %t)", key, token, before, e.shared)
		}
		b.greatest[key] = max(token, before)
	}
	if b.held[key] == nil {
		b.held[key] = make(map[*pgxlock.Lock]entry)
	}
	b.held[key][lock] = e
}

// release takes a lock out, and then gives it back: by two at once, now and then.
func (b *ledger) release(lock *pgxlock.Lock, twice bool) {
	b.mu.Lock()
	delete(b.held[sameLock(lock.Key())], lock)
	b.mu.Unlock()
	if twice {
		go func() { _ = lock.Release(context.Background()) }()
	}
	_ = lock.Release(context.Background())
}

// live returns the keys of what is still believed in, with how often the server
// knows them: once for each session.
func (b *ledger) live() map[string]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	live := make(map[string]int)
	for key, locks := range b.held {
		sessions := make(map[*pgxlock.Locker]bool)
		for lock, e := range locks {
			if lock.Err() == nil {
				sessions[e.locks] = true
			}
		}
		if len(sessions) > 0 {
			live[fmt.Sprint(pgxlock.AdvisoryID(key))] = len(sessions)
		}
	}
	return live
}

// advisoryHeld returns the locks of soakKeys that are held, as the server knows them.
func advisoryHeld(t *testing.T, db *pgtest.DB) map[string]int {
	t.Helper()
	held := make(map[string]int)
	for _, key := range soakKeys[:9] {
		n := testkit.Query[int](t, db, `select count(*) from pg_locks where locktype = 'advisory' and granted
			and database = (select oid from pg_database where datname = current_database())
			and objsubid = case when $2 then 2 else 1 end
			and classid::bigint = ($1::bigint >> 32) & 4294967295 and objid::bigint = $1::bigint & 4294967295`,
			pgxlock.AdvisoryID(key), key == soakKeys[8])
		if n > 0 {
			held[fmt.Sprint(pgxlock.AdvisoryID(key))] = n
		}
	}
	return held
}

// useAtRandom makes some calls, of which some are cut short, and counts what is granted.
func useAtRandom(ctx context.Context, dice *rand.Rand, lockers []*pgxlock.Locker, book *ledger, over func() bool, grants *atomic.Int64) {
	for !over() {
		locks := lockers[dice.IntN(len(lockers))]
		wait, cancel := context.WithTimeout(ctx, time.Duration(dice.ExpFloat64()*float64(20*time.Millisecond)))
		if dice.IntN(20) == 0 {
			cancel()
		}
		e := entry{locks: locks, shared: dice.IntN(3) == 0}
		var opts []pgxlock.AcquireOption
		if e.shared {
			opts = append(opts, pgxlock.Shared)
		}
		key := soakKeys[dice.IntN(len(soakKeys))]
		var got pgxlock.Locks
		switch dice.IntN(6) {
		case 0, 1:
			if lock, err := locks.Acquire(wait, key, opts...); err == nil {
				got = pgxlock.Locks{lock}
			}
		case 2, 3:
			if lock, err := locks.TryAcquire(wait, key, opts...); err == nil {
				got = pgxlock.Locks{lock}
			}
		case 4:
			var keys []string
			for range 1 + dice.IntN(5) {
				keys = append(keys, soakKeys[dice.IntN(len(soakKeys))])
			}
			got, _ = locks.AcquireAll(wait, keys, append(opts, pgxlock.MaxWait(10*time.Millisecond))...)
		case 5:
			_, _ = locks.Holders(wait, key)
		}
		for _, lock := range got {
			grants.Add(1)
			book.grant(lock, e)
		}
		if dice.IntN(4) == 0 && len(got) > 0 {
			_ = got[0].Renew(wait)
		}
		if dice.IntN(2) == 0 {
			cancel()
		}
		for _, lock := range got {
			book.release(lock, dice.IntN(8) == 0)
		}
		cancel()
	}
}

// A statement fails when some of what it asks for was granted.
func TestFullLockTableIsNoBusyKeyAndNothingOfTheRequestStays(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	_, db := privateServer(t, map[string]string{"max_locks_per_transaction": "10", "max_connections": "10", "max_wal_senders": "0"})
	locks := testkit.Advisory(t, db.Pool, &pgxlock.AdvisoryConfig{MaxLocks: 20_000})
	held, err := locks.Acquire(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for i := range 2000 { // there is room for some 500
		keys = append(keys, fmt.Sprint("key:", i))
	}
	watcher := db.Connect(t)
	var asking sync.WaitGroup
	for _, opts := range [][]pgxlock.AcquireOption{{testkit.LongWait}, {testkit.LongWait, pgxlock.Shared}} {
		asking.Go(func() {
			_, err := locks.AcquireAll(t.Context(), keys, opts...)
			if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "53200" || errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("more locks than there is room for: %v", err)
			}
		})
	}
	asking.Wait()
	pgtest.Until(t, "only what was held before is held", func() bool {
		var n int // of the session's own, too; nobody else can work as long as the table is full
		err := watcher.QueryRow(t.Context(), `select count(*) from pg_locks l where l.locktype = 'advisory'
			and l.pid = (select h.pid from pg_locks h where h.locktype = 'advisory' and (h.classid::bigint << 32 | h.objid::bigint) = $1)`,
			pgxlock.AdvisoryID("a")).Scan(&n)
		return err == nil && n == 2
	})
	if err := held.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// Not parallel: they count goroutines, and others must have none meanwhile. Each disturbance ends
// with a pause, which is a factor longer on a slow machine.
const (
	// Only sessions that are ready: on a slow machine none would ever become so.
	cancelStatements = `select count(pg_cancel_backend(pid)), pg_sleep(0.003 * $1::float8) from pg_stat_activity a, generate_series(1, 3)
		where datname = current_database() and application_name like 'pgxlock %'
		  and exists (select from pg_locks l where l.pid = a.pid and l.locktype = 'advisory')`
	terminateSessions = `select count(pg_terminate_backend(pid)), pg_sleep(0.1 * $1::float8) from pg_stat_activity
		where datname = current_database() and application_name like 'pgxlock %' and random() < 0.3`
)

func TestSoakAdvisoryLocksExcludeAndLeaveNothingBehindWhateverIsDoneToThem(t *testing.T) {
	pgtest.Long(t)
	soak(t, pgtest.New(t), &ledger{t: t}, cancelStatements)
}

func TestSoakAdvisoryLocksExcludeAndLeaveNothingBehindWhileTheirSessionsEnd(t *testing.T) {
	pgtest.Long(t)
	soak(t, pgtest.New(t), &ledger{t: t, terminates: true}, terminateSessions)
}

func TestSoakAdvisoryTokensGrowAndNothingIsLeftBehindWhateverIsDoneToTheStatements(t *testing.T) {
	pgtest.Long(t)
	soak(t, testkit.Migrated(t), &ledger{t: t, tokens: true}, cancelStatements)
}

func TestSoakAdvisoryLocksWithTokensExcludeWhileTheirSessionsEnd(t *testing.T) {
	pgtest.Long(t)
	soak(t, testkit.Migrated(t), &ledger{t: t, tokens: true, terminates: true}, terminateSessions)
}

func soak(t *testing.T, db *pgtest.DB, book *ledger, disturbance string) {
	duration := pgtest.Soak(t, time.Second, time.Minute)
	before := len(goroutines())
	cfg := &pgxlock.AdvisoryConfig{Tokens: book.tokens}
	lockers := []*pgxlock.Locker{testkit.Advisory(t, db.Pool, cfg), testkit.Advisory(t, db.Pool, cfg)}
	for i, locks := range lockers {
		lock, err := locks.Acquire(t.Context(), soakKeys[i])
		if err == nil {
			err = lock.Release(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	book.held, book.greatest = make(map[string]map[*pgxlock.Lock]entry), make(map[string]int64)

	stop := make(chan struct{})
	var disturbing, working sync.WaitGroup
	var disturbed, grants atomic.Int64
	disturbing.Go(func() {
		factor, granted := 1., int64(0) // a slow machine grants nothing between two disturbances: those become rare until it does
		for {
			select {
			case <-stop:
				return
			default:
				var n int64
				if err := db.Pool.QueryRow(t.Context(), disturbance, factor).Scan(&n, nil); err != nil {
					t.Error(err)
					return
				}
				disturbed.Add(n)
				if now := grants.Load(); now > granted {
					factor, granted = 1, now
				} else {
					factor = min(2*factor, 256)
				}
			}
		}
	})
	began := time.Now()
	over := func() bool { // a slow machine may have done nothing at all by then
		tried := grants.Load() > 0 && disturbed.Load() > 0
		return time.Since(began) > duration && (tried || time.Since(began) > pgtest.Patience)
	}
	for w := range 24 {
		working.Go(func() {
			dice := rand.New(rand.NewPCG(uint64(w), uint64(time.Now().UnixNano())))
			useAtRandom(t.Context(), dice, lockers, book, over, &grants)
		})
	}
	working.Wait()
	close(stop)
	disturbing.Wait()
	t.Logf("%d grants, disturbed %d times", grants.Load(), disturbed.Load())
	if grants.Load() == 0 || disturbed.Load() == 0 {
		t.Error("nothing was tried")
	}

	for i, locks := range lockers { // some are still held at the end
		for _, key := range []string{soakKeys[i], soakKeys[7+i]} {
			var lock *pgxlock.Lock
			pgtest.Until(t, "the last disturbance is over", func() bool { // its signals may come late
				var err error
				lock, err = locks.Acquire(t.Context(), key)
				return err == nil
			})
			book.grant(lock, entry{locks: locks})
		}
	}
	live := book.live()
	if len(live) != 2*len(lockers) {
		t.Errorf("these are believed in: %v", live)
	}
	pgtest.Until(t, "the server has what is believed in, and nothing else", func() bool {
		return maps.Equal(advisoryHeld(t, db), live)
	})
	for _, locks := range lockers {
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	pgtest.Until(t, "nothing is locked and nobody is connected", func() bool {
		return testkit.Query[bool](t, db, `select not exists (select from pg_stat_activity where datname = current_database() and application_name like 'pgxlock %')
			and not exists (select from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database()))`)
	})
	var left []string
	pgtest.Until(t, "our goroutines have ended", func() bool {
		left = slices.DeleteFunc(goroutines(), func(stack string) bool { return len(stack) == 0 })
		return len(left) <= before
	})
}
