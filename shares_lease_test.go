// This file is about leases that several share.

package pgxlock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

const (
	shareSQL         = "pgxlock_acquire_in_turn"
	releaseSharesSQL = "pgxlock_release_shares_batch"
)

// shared says who shares a lease now, as the server knows.
func shared(t *testing.T, db *pgtest.DB, key string) []string {
	t.Helper()
	return query[[]string](t, db, "select array(select holder_id::text from lock_shares where lock_name = $1 and state = 'live' order by acquired_at)", key)
}

// Two Lockers, and SQL callers of the functions of both kinds.
func TestReadersOfSeveralProcessesKeepWritersOut(t *testing.T) {
	t.Parallel()
	db := roomy(t, withLedger(t), 20)
	here, there := newLocker(t, db, &pgxlock.LeaseConfig{Owner: "here"}), newLocker(t, db, &pgxlock.LeaseConfig{Owner: "there"})
	first := acquire(t, here, "k", pgxlock.Shared, pgxlock.Metadata("report"))
	second, err := there.TryAcquire(t.Context(), "k", pgxlock.Shared)
	if err != nil {
		t.Fatal(err)
	}
	if !query[bool](t, db, "select acquire_shared_lock('k', 'sql')") || query[bool](t, db, "select acquire_lock('k', 'sql')") {
		t.Error("SQL callers are not told what is shared")
	}
	holders, err := there.Holders(t.Context(), "k")
	if err != nil || len(holders) != 3 {
		t.Fatal(holders, err)
	}
	slices.SortFunc(holders, func(a, b pgxlock.Holder) int { return strings.Compare(a.Owner, b.Owner) })
	for i, owner := range []string{first.Holder(), "sql", second.Holder()} {
		if h := holders[i]; h.Owner != owner || h.Mode != pgxlock.Shared || h.Token != first.Token() || h.Since.IsZero() || !h.Expires.After(h.Since) || (h.Metadata == "report") != (i == 0) {
			t.Errorf("%+v", h)
		}
	}
	if second.Token() != first.Token() || first.Token() == 0 {
		t.Errorf("tokens %d and %d in one group", first.Token(), second.Token())
	}
	_, err = there.TryAcquire(t.Context(), "k")
	if e, ok := errors.AsType[*pgxlock.Error](err); !ok || !errors.Is(err, pgxlock.ErrNotAcquired) || e.Holder != "*shared" || e.RetryAfter <= 0 {
		t.Errorf("a writer: %v", err)
	}
	if ran, err := there.TryDo(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { return nil }); ran || err != nil {
		t.Errorf("TryDo: %t, %v", ran, err)
	}
	err = here.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error { return writeRow(ctx, tx) }, pgxlock.Shared)
	if err != nil {
		t.Error(err)
	}
	if n := query[int](t, db, "select count(*) from ledger"); n != 1 {
		t.Errorf("%d rows were written", n)
	}
	for _, lock := range []*pgxlock.Lock{first, second} {
		if err := lock.Renew(t.Context()); err != nil {
			t.Error(err)
		}
		release(t, lock)
	}
	db.Exec(t, "select release_shared_lock('k', 'sql')")
	writer := acquire(t, there, "k", pgxlock.NoWait)
	if writer.Token() <= first.Token() {
		t.Errorf("token %d after %d", writer.Token(), first.Token())
	}
	if query[bool](t, db, "select acquire_shared_lock('k', 'sql')") {
		t.Error("shared beside a writer")
	}
}

// A writer waits for readers of another process, and new readers behind it, though
// others who do not wait pass it. If it takes too long to come when it is woken it is
// passed by, which a slow machine may do now and then, but not each time.
func TestReadersDoNotPassAWriterThatWaitsForALease(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	readers, writers := listening(t, db, "readers"), listening(t, db, "writers")
	passed := true
	for round := 0; round < 5 && passed; round++ {
		reading := acquire(t, readers, "k", pgxlock.Shared)
		granted := waits(t, writers, "k")
		untilQueued(t, db, "k", 1)
		late := waits(t, readers, "k", pgxlock.Shared)
		untilQueued(t, db, "k", 2)
		later := waits(t, writers, "k", pgxlock.Shared)
		until(t, "it stands behind the writer", func() bool { return writers.Waiting("k") == 2 })
		wantNoShare(t, "the readers", readers, "k")
		release(t, reading)
		select {
		case writing := <-granted:
			passed = false
			for _, reader := range []<-chan *pgxlock.Lock{late, later} {
				select {
				case <-reader:
					t.Fatal("a reader has the lock beside the writer")
				default:
				}
			}
			release(t, writing)
			release(t, <-late)
		case reading := <-late:
			release(t, reading)
			release(t, <-granted)
		}
		release(t, <-later)
		noTickets(t, db)
	}
	if passed {
		t.Error("five times a reader has passed the writer")
	}
}

// Readers who overlap all the time, in two processes: a writer of each gets its turn.
func TestAStreamOfReadersStarvesNoWriter(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 30)
	lockers := []*pgxlock.Locker{newLocker(t, db, nil), newLocker(t, db, nil)}
	stop := make(chan struct{})
	var reading, writing, reads, writes atomic.Int64
	var streams, turns sync.WaitGroup
	for i := range 6 {
		streams.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := lockers[i%2].Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error {
					reading.Add(1)
					defer reading.Add(-1)
					if writing.Load() != 0 {
						t.Error("a reader beside a writer")
					}
					reads.Add(1)
					return nil
				}, pgxlock.Shared); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for _, locks := range lockers {
		turns.Go(func() {
			for range 5 {
				if err := locks.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error {
					if writing.Add(1) != 1 || reading.Load() != 0 {
						t.Error("a writer beside others")
					}
					writing.Add(-1)
					writes.Add(1)
					return nil
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	turns.Wait()
	close(stop)
	streams.Wait()
	t.Logf("%d reads beside %d writes", reads.Load(), writes.Load())
	if n := len(shared(t, db, "k")); n != 0 {
		t.Errorf("%d shares are left", n)
	}
	noTickets(t, db)
}

// One release lets in all the readers who stand in a row, of whatever process.
func TestReadersInARowAllComeIn(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 40)
	lock := acquire(t, newLocker(t, db, nil), "k")
	woken := countNotifications(t, db)
	const processes = 4
	var granted []<-chan *pgxlock.Lock
	for i := range processes {
		locks := listening(t, db, fmt.Sprint("reader", i))
		for range 2 {
			granted = append(granted, waits(t, locks, "k", pgxlock.Shared))
		}
		untilQueued(t, db, "k", i+1)
		until(t, "both wait", func() bool { return locks.Waiting("k") == 2 })
	}
	before := woken()
	release(t, lock)
	var readers []*pgxlock.Lock
	for _, reader := range granted { // none of them has to go for the next one
		readers = append(readers, <-reader)
	}
	if n := len(shared(t, db, "k")); n != 2*processes {
		t.Errorf("%d share it", n)
	}
	if n := woken() - before; n < processes-1 {
		t.Errorf("%d were woken", n)
	}
	for _, reader := range readers {
		release(t, reader)
	}
	noTickets(t, db)
}

// Of the last readers nobody is left who could wake the writer.
func TestReadersWhoCrashKeepAWriterOutUntilTheyHaveRunOut(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	readers, writers := newLocker(t, db, nil), listening(t, db, "writer")
	reading := acquire(t, readers, "k", pgxlock.Shared, pgxlock.TTL(time.Hour))
	if !query[bool](t, db, "select acquire_shared_lock('k', 'crashed', 1)") {
		t.Fatal("not shared")
	}
	granted := waits(t, writers, "k")
	untilQueued(t, db, "k", 1)
	release(t, reading)
	release(t, <-granted) // in an hour, if its time counted still
	noTickets(t, db)
}

// A ticket of a process that has died stands before a reader; nobody gives anything
// back that could wake it.
func TestAReaderComesInWhenWhoStandsBeforeItHasDied(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	other, locks := newLocker(t, db, nil), listening(t, db, "reader")
	reading := acquire(t, other, "k", pgxlock.Shared, pgxlock.TTL(time.Hour)) // at whose end it would ask
	db.Exec(t, `insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until)
		values (0, 'k', -1, 'somebody', 1, clock_timestamp(), clock_timestamp() + interval '1 hour')`)
	granted := waits(t, locks, "k", pgxlock.Shared)
	untilQueued(t, db, "k", 1)
	db.Exec(t, "update pgxlock_waiters set live_until = clock_timestamp() where ticket = -1")
	release(t, <-granted)
	release(t, reading)
	noTickets(t, db)
}

// Somebody has joined and not committed, which keeps nobody out.
func TestWhoIsJustJoiningIsWaitedFor(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 30)
	reading := acquire(t, newLocker(t, db, nil), "k", pgxlock.Shared)
	joining := begin(t, db, pgx.TxOptions{})
	if _, err := joining.Exec(t.Context(), "select acquire_shared_lock('k', 'sql')"); err != nil {
		t.Fatal(err)
	}
	locks := listening(t, db, "reader")
	var asked atomic.Int64
	hasty := newLocker(t, &pgtest.DB{Pool: db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = whenAsked{shareSQL, func() {
			if asked.Add(1) == 2 { // the first time it was locked
				commit(t, joining)
			}
		}}
	}), URL: db.URL, Name: db.Name}, nil)
	release(t, acquire(t, hasty, "k", pgxlock.Shared, pgxlock.NoWait))

	joining = begin(t, db, pgx.TxOptions{})
	if _, err := joining.Exec(t.Context(), "select acquire_shared_lock('k', 'sql')"); err != nil {
		t.Fatal(err)
	}
	_, err := locks.TryAcquire(t.Context(), "k", pgxlock.Shared)
	if !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("while the row is locked: %v", err)
	}
	granted := waits(t, locks, "k", pgxlock.Shared)
	untilQueued(t, db, "k", 1)
	commit(t, joining)
	release(t, <-granted)
	release(t, reading)

	// Many who come at the same time all come in.
	var lockers []*pgxlock.Locker
	for range 5 {
		lockers = append(lockers, newLocker(t, db, nil))
	}
	var all sync.WaitGroup
	for i := range 40 {
		all.Go(func() { acquire(t, lockers[i%len(lockers)], "crowd", pgxlock.Shared, longWait) })
	}
	all.Wait()
	if n := len(shared(t, db, "crowd")); n != 40 {
		t.Errorf("%d share it", n)
	}
}

// whenAsked calls a function before each statement that contains a text is sent.
type whenAsked struct {
	sql string
	do  func()
}

func (w whenAsked) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, w.sql) {
		w.do()
	}
	return ctx
}

func (whenAsked) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestSharesAreRenewed(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	var held []*pgxlock.Lock
	for range 2 {
		locks := newLocker(t, db, nil)
		for range 10 {
			held = append(held, acquire(t, locks, "k", pgxlock.Shared, pgxlock.TTL(6*time.Second)))
		}
		held = append(held, acquire(t, locks, fmt.Sprint("alone", len(held)), pgxlock.TTL(6*time.Second)))
	}
	until(t, "all were renewed more than once", func() bool {
		return query[bool](t, db, "select bool_and(expires_at > acquired_at + interval '9 seconds') from (select acquired_at, expires_at from distributed_lock_shares union all select acquired_at, expires_at from distributed_locks) l")
	})
	for _, lock := range held {
		if err := lock.Err(); err != nil {
			t.Error(err)
		}
		release(t, lock)
	}
	if n := query[int](t, db, "select (select count(*) from distributed_locks) + (select count(*) from distributed_lock_shares)"); n != 0 {
		t.Errorf("%d rows are left", n)
	}
}

// The group is over, or the share was given back by somebody else.
func TestAShareThatIsGoneIsLost(t *testing.T) {
	t.Parallel()
	db := withLedger(t)
	locks := newLocker(t, db, nil)
	for i, end := range []string{
		"delete from distributed_locks where lock_name = $1",
		"delete from distributed_locks where lock_name = $1; select acquire_shared_lock($1, 'another')",
		"delete from distributed_lock_shares where lock_name = $1",
		"update distributed_lock_shares set expires_at = clock_timestamp() where lock_name = $1; update distributed_locks set expires_at = clock_timestamp() where lock_name = $1; select acquire_lock($1, 'writer')",
	} {
		key := fmt.Sprint("k", i)
		lock := acquire(t, locks, key, pgxlock.Shared)
		tx := begin(t, db, pgx.TxOptions{})
		if err := lock.Fence(t.Context(), tx); err != nil {
			t.Error(err)
		}
		rollback(t, tx)
		db.Exec(t, strings.ReplaceAll(end, "$1", "'"+key+"'"))
		tx = begin(t, db, pgx.TxOptions{})
		if err := lock.Fence(t.Context(), tx); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("%s: Fence: %v", end, err)
		}
		rollback(t, tx)
		if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("%s: Renew: %v", end, err)
		}
		if err := lock.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("%s: Release: %v", end, err)
		}
	}
}

// A fenced transaction of one reader is open; its release waits for that, and the
// others come and go.
func TestAFencedShareIsGivenBackWhenItsTransactionHasEnded(t *testing.T) {
	t.Parallel()
	asked, db := counted(t, migrated(t), releaseSharesSQL)
	locks := newLocker(t, db, nil)
	lock := acquire(t, locks, "k", pgxlock.Shared)
	tx := begin(t, db, pgx.TxOptions{})
	if err := lock.Fence(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	release(t, acquire(t, locks, "k", pgxlock.Shared))
	released := releasing(t, lock, asked)
	if query[bool](t, db, "select acquire_lock('k', 'writer')") {
		t.Error("a writer beside a fenced reader")
	}
	commit(t, tx)
	if err := <-released; err != nil {
		t.Error(err)
	}
	if !query[bool](t, db, "select acquire_lock('k', 'writer')") {
		t.Error("it is not free")
	}
}

func TestALostReplyLeavesNoShareThatNobodyOwns(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	p, through := proxied(t, db)
	locks := newLocker(t, through, nil)
	first := acquire(t, locks, "k", pgxlock.Shared)
	lost := p.arm(t, loseReply, shareSQL)
	second := acquire(t, locks, "k", pgxlock.Shared) // asks again on a new connection
	lost.happened(t)
	until(t, "two share it", func() bool { return len(shared(t, db, "k")) == 2 })
	if got := shared(t, db, "k"); !slices.Contains(got, first.Holder()) || !slices.Contains(got, second.Holder()) {
		t.Errorf("%q share it", got)
	}
	for _, lock := range []*pgxlock.Lock{first, second} {
		lost := p.arm(t, loseReply, releaseSharesSQL)
		release(t, lock)
		lost.happened(t)
	}
	if len(rows(t, db)) != 0 {
		t.Error("the group is left")
	}
}

func TestReadersInMemoryDoNotPassAWriter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks := pgxlock.NewMemory()
		var mu sync.Mutex
		var order []string
		first := acquire(t, locks, "k", pgxlock.Shared)
		second := acquire(t, locks, "k", pgxlock.Shared, pgxlock.Metadata("two"))
		if found, err := locks.Holders(t.Context(), "k"); err != nil || len(found) != 2 || found[1].Metadata != "two" || found[0].Token != found[1].Token {
			t.Errorf("%+v, %v", found, err)
		}
		var all sync.WaitGroup
		for _, waiting := range []struct {
			name string
			mode pgxlock.Mode
		}{{"writer", pgxlock.Exclusive}, {"reader", pgxlock.Shared}, {"reader", pgxlock.Shared}, {"writer", pgxlock.Exclusive}} {
			all.Go(func() {
				if err := locks.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error {
					mu.Lock()
					order = append(order, waiting.name)
					mu.Unlock()
					time.Sleep(time.Minute)
					return nil
				}, waiting.mode); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		release(t, first)
		synctest.Wait()
		if len(order) != 0 {
			t.Errorf("%q have it beside a reader", order)
		}
		began := time.Now()
		release(t, second)
		all.Wait()
		if want := []string{"writer", "reader", "reader", "writer"}; !slices.Equal(order, want) || time.Since(began) != 3*time.Minute {
			t.Errorf("%q after %s", order, time.Since(began))
		}
		if err := locks.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}
