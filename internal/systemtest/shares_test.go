package systemtest_test

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
	"github.com/pgxlock/pgxlock/internal/testkit"
)

const (
	shareSQL         = "pgxlock_try_in_turn"
	releaseSharesSQL = "pgxlock_release_shares_batch"
)

// Two Lockers, and SQL callers of the functions of both kinds.
func TestReadersOfSeveralProcessesKeepWritersOut(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.WithLedger(t), 20)
	here, there := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "here"}), testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "there"})
	first := testkit.Acquire(t, here, "k", pgxlock.Shared, pgxlock.Metadata("report"))
	second, err := there.TryAcquire(t.Context(), "k", pgxlock.Shared)
	if err != nil {
		t.Fatal(err)
	}
	if !testkit.Query[bool](t, db, "select acquire_shared_lock('k', 'sql')") || testkit.Query[bool](t, db, "select acquire_lock('k', 'sql')") {
		t.Error("SQL callers are not told what is shared")
	}
	holders, err := there.Holders(t.Context(), "k")
	if err != nil || len(holders) != 3 {
		t.Fatal(holders, err)
	}
	slices.SortFunc(holders, func(a, b pgxlock.Holder) int { return strings.Compare(a.ID, b.ID) })
	for i, owner := range []string{first.Holder(), "sql", second.Holder()} {
		if h := holders[i]; h.ID != owner || h.Mode != pgxlock.Shared || h.Token != first.Token() || h.Since.IsZero() || !h.Expires.After(h.Since) || (h.Metadata == "report") != (i == 0) {
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
	err = here.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error { return testkit.WriteRow(ctx, tx) }, pgxlock.Shared)
	if err != nil {
		t.Error(err)
	}
	if n := testkit.Query[int](t, db, "select count(*) from ledger"); n != 1 {
		t.Errorf("%d rows were written", n)
	}
	for _, lock := range []*pgxlock.Lock{first, second} {
		if err := lock.Renew(t.Context()); err != nil {
			t.Error(err)
		}
		testkit.Release(t, lock)
	}
	db.Exec(t, "select release_shared_lock('k', 'sql')")
	writer := testkit.Acquire(t, there, "k", pgxlock.NoWait)
	if writer.Token() <= first.Token() {
		t.Errorf("token %d after %d", writer.Token(), first.Token())
	}
	if testkit.Query[bool](t, db, "select acquire_shared_lock('k', 'sql')") {
		t.Error("shared beside a writer")
	}
}

// A writer waits for readers of another process, and new readers wait behind it.
func TestReadersDoNotPassAWriterThatWaitsForALease(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	testkit.KeepTurns(t, db)
	readers, writers := testkit.Listening(t, db, "readers"), testkit.Listening(t, db, "writers")
	reading := testkit.Acquire(t, readers, "k", pgxlock.Shared)
	granted := testkit.Waits(t, writers, "k")
	testkit.UntilQueued(t, db, "k", 1)
	late := testkit.Waits(t, readers, "k", pgxlock.Shared)
	testkit.UntilQueued(t, db, "k", 2)
	later := testkit.Waits(t, writers, "k", pgxlock.Shared)
	testkit.UntilWaiting(t, db, "k", 3) // the last one behind the writer of its own Locker
	testkit.WantNoShare(t, "the readers", readers, "k")
	testkit.Release(t, reading)
	select {
	case writing := <-granted:
		if len(late) > 0 || len(later) > 0 {
			t.Error("a reader has the lock beside the writer")
		}
		testkit.Release(t, writing)
		testkit.Release(t, <-late)
	case reading := <-late:
		t.Error("a reader has passed the writer")
		testkit.Release(t, reading)
		testkit.Release(t, <-granted)
	}
	testkit.Release(t, <-later)
	testkit.NoTickets(t, db)
}

// Readers of two processes overlap all the time; a writer of each process is served.
func TestStreamOfReadersStarvesNoWriter(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	lockers := []*pgxlock.Locker{testkit.NewLocker(t, db, nil), testkit.NewLocker(t, db, nil)}
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
	if n := len(testkit.Sharing(t, db, "k")); n != 0 {
		t.Errorf("%d shares are left", n)
	}
	testkit.NoTickets(t, db)
}

// One release lets in all readers that wait in a row, of whatever process.
func TestReadersInARowAllComeIn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 40)
	first, woken, most := testkit.NewLocker(t, db, nil), testkit.CountNotifications(t, db), 0
	const processes = 4
	var lockers []*pgxlock.Locker
	for i := range processes {
		lockers = append(lockers, testkit.Listening(t, db, fmt.Sprint("reader", i)))
	}
	for round := 0; round < 20 && most < processes-1; round++ { // now and then the look comes first
		lock := testkit.Acquire(t, first, "k")
		var granted []<-chan *pgxlock.Lock
		for i, locks := range lockers {
			for range 2 {
				granted = append(granted, testkit.Waits(t, locks, "k", pgxlock.Shared))
			}
			testkit.UntilQueued(t, db, "k", i+1)
			testkit.UntilWaiting(t, db, "k", 2*(i+1))
		}
		before := woken()
		testkit.Release(t, lock)
		var readers []*pgxlock.Lock
		for _, reader := range granted { // none of them has to go for the next one
			readers = append(readers, <-reader)
		}
		if n := len(testkit.Sharing(t, db, "k")); n != 2*processes {
			t.Errorf("%d share it", n)
		}
		most = max(most, woken()-before)
		for _, reader := range readers {
			testkit.Release(t, reader)
		}
		testkit.NoTickets(t, db)
	}
	if most < processes-1 {
		t.Errorf("at most %d were woken", most)
	}
}

// The last readers crashed, so that nobody can wake the writer.
func TestReadersWhoCrashKeepAWriterOutUntilTheyHaveRunOut(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	readers, writers := testkit.NewLocker(t, db, nil), testkit.Listening(t, db, "writer")
	reading := testkit.Acquire(t, readers, "k", pgxlock.Shared, pgxlock.TTL(time.Hour))
	if !testkit.Query[bool](t, db, "select acquire_shared_lock('k', 'crashed', 1)") {
		t.Fatal("not shared")
	}
	granted := testkit.Waits(t, writers, "k")
	testkit.UntilQueued(t, db, "k", 1)
	testkit.Release(t, reading)
	testkit.Release(t, <-granted) // in an hour, if its time counted still
	testkit.NoTickets(t, db)
}

// The ticket of a process that died is before a reader's; nobody releases anything, so that
// nobody wakes the reader.
func TestReaderComesInWhenWhoStandsBeforeItHasDied(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	other, locks := testkit.NewLocker(t, db, nil), testkit.Listening(t, db, "reader")
	reading := testkit.Acquire(t, other, "k", pgxlock.Shared, pgxlock.TTL(time.Hour)) // at whose end it would ask
	db.Exec(t, `insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until)
		values (0, 'k', -1, 'somebody', 1, clock_timestamp(), clock_timestamp() + interval '1 hour')`)
	granted := testkit.Waits(t, locks, "k", pgxlock.Shared)
	testkit.UntilQueued(t, db, "k", 1)
	db.Exec(t, "update pgxlock_waiters set live_until = clock_timestamp() where ticket = -1")
	testkit.Release(t, <-granted)
	testkit.Release(t, reading)
	testkit.NoTickets(t, db)
}

// A transaction has joined the readers and not committed, which must refuse no other reader.
func TestTryWaitsForAReaderThatIsJustJoining(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	reading := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k", pgxlock.Shared)
	joining := testkit.Begin(t, db, pgx.TxOptions{})
	if _, err := joining.Exec(t.Context(), "select acquire_shared_lock('k', 'sql')"); err != nil {
		t.Fatal(err)
	}
	locks := testkit.Listening(t, db, "reader")
	var asked atomic.Int64
	hasty := testkit.NewLocker(t, &pgtest.DB{Pool: db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = testkit.OnStatement(shareSQL, func() {
			if asked.Add(1) == 2 { // the first time it was locked
				testkit.Commit(t, joining)
			}
		})
	}), URL: db.URL, Name: db.Name}, nil)
	testkit.Release(t, testkit.Acquire(t, hasty, "k", pgxlock.Shared, pgxlock.NoWait))

	joining = testkit.Begin(t, db, pgx.TxOptions{})
	if _, err := joining.Exec(t.Context(), "select acquire_shared_lock('k', 'sql')"); err != nil {
		t.Fatal(err)
	}
	_, err := locks.TryAcquire(t.Context(), "k", pgxlock.Shared)
	if !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("while the row is locked: %v", err)
	}
	granted := testkit.Waits(t, locks, "k", pgxlock.Shared)
	testkit.UntilQueued(t, db, "k", 1)
	testkit.Commit(t, joining)
	testkit.Release(t, <-granted)
	testkit.Release(t, reading)

	// Many who come at the same time all come in.
	var lockers []*pgxlock.Locker
	for range 5 {
		lockers = append(lockers, testkit.NewLocker(t, db, nil))
	}
	var all sync.WaitGroup
	for i := range 40 {
		all.Go(func() { testkit.Acquire(t, lockers[i%len(lockers)], "crowd", pgxlock.Shared, testkit.LongWait) })
	}
	all.Wait()
	if n := len(testkit.Sharing(t, db, "crowd")); n != 40 {
		t.Errorf("%d share it", n)
	}
}

func TestSharesAreRenewed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	var held []*pgxlock.Lock
	for range 2 {
		locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: testkit.TTL, Renew: time.Second})
		for range 10 {
			held = append(held, testkit.Acquire(t, locks, "k", pgxlock.Shared))
		}
		held = append(held, testkit.Acquire(t, locks, fmt.Sprint("alone", len(held))))
	}
	pgtest.Until(t, "all were renewed more than once", func() bool {
		return testkit.Query[bool](t, db, "select bool_and(expires_at > acquired_at + interval '10 minutes 2 seconds') from (select acquired_at, expires_at from distributed_lock_shares union all select acquired_at, expires_at from distributed_locks) l")
	})
	for _, lock := range held {
		if err := lock.Err(); err != nil {
			t.Error(err)
		}
		testkit.Release(t, lock)
	}
	if n := testkit.Query[int](t, db, "select (select count(*) from distributed_locks) + (select count(*) from distributed_lock_shares)"); n != 0 {
		t.Errorf("%d rows are left", n)
	}
}

// The group of readers has ended, or somebody else released the share.
func TestShareThatIsGoneIsLost(t *testing.T) {
	t.Parallel()
	db := testkit.WithLedger(t)
	locks := testkit.NewLocker(t, db, nil)
	for i, end := range []string{
		"delete from distributed_locks where lock_name = $1",
		"delete from distributed_locks where lock_name = $1; select acquire_shared_lock($1, 'another')",
		"delete from distributed_lock_shares where lock_name = $1",
		"update distributed_lock_shares set expires_at = clock_timestamp() where lock_name = $1; update distributed_locks set expires_at = clock_timestamp() where lock_name = $1; select acquire_lock($1, 'writer')",
	} {
		key := fmt.Sprint("k", i)
		lock := testkit.Acquire(t, locks, key, pgxlock.Shared)
		tx := testkit.Begin(t, db, pgx.TxOptions{})
		if err := lock.Fence(t.Context(), tx); err != nil {
			t.Error(err)
		}
		testkit.Rollback(t, tx)
		db.Exec(t, strings.ReplaceAll(end, "$1", "'"+key+"'"))
		tx = testkit.Begin(t, db, pgx.TxOptions{})
		if err := lock.Fence(t.Context(), tx); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("%s: Fence: %v", end, err)
		}
		testkit.Rollback(t, tx)
		if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("%s: Renew: %v", end, err)
		}
		if err := lock.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("%s: Release: %v", end, err)
		}
	}
}

// A fenced transaction of one reader is open: its release waits for the transaction, and other
// readers acquire and release.
func TestFencedShareIsGivenBackWhenItsTransactionHasEnded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	asked, db := testkit.Counted(t, testkit.Migrated(t), releaseSharesSQL)
	locks := testkit.NewLocker(t, db, nil)
	lock := testkit.Acquire(t, locks, "k", pgxlock.Shared)
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	if err := lock.Fence(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	testkit.Release(t, testkit.Acquire(t, locks, "k", pgxlock.Shared))
	released := testkit.Releasing(t, lock, asked)
	if testkit.Query[bool](t, db, "select acquire_lock('k', 'writer')") {
		t.Error("a writer beside a fenced reader")
	}
	testkit.Commit(t, tx)
	if err := <-released; err != nil {
		t.Error(err)
	}
	if !testkit.Query[bool](t, db, "select acquire_lock('k', 'writer')") {
		t.Error("it is not free")
	}
}

func TestLostReplyLeavesNoShareThatNobodyOwns(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	locks := testkit.NewLocker(t, through, nil)
	first := testkit.Acquire(t, locks, "k", pgxlock.Shared)
	lost := p.Arm(t, testkit.LoseReply, shareSQL)
	second := testkit.Acquire(t, locks, "k", pgxlock.Shared) // asks again on a new connection
	lost.Happened(t)
	pgtest.Until(t, "two share it", func() bool { return len(testkit.Sharing(t, db, "k")) == 2 })
	if got := testkit.Sharing(t, db, "k"); !slices.Contains(got, first.Holder()) || !slices.Contains(got, second.Holder()) {
		t.Errorf("%q share it", got)
	}
	for _, lock := range []*pgxlock.Lock{first, second} {
		lost := p.Arm(t, testkit.LoseReply, releaseSharesSQL)
		testkit.Release(t, lock)
		lost.Happened(t)
	}
	if len(testkit.Rows(t, db)) != 0 {
		t.Error("the group is left")
	}
}

func TestDowngradeSurvivesALostReply(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	p, through := testkit.Proxied(t, db)
	locks := testkit.NewLocker(t, through, &pgxlock.LeaseConfig{TTL: time.Hour})
	lock := testkit.Acquire(t, locks, "k", pgxlock.Metadata("mine"))
	lost := p.Arm(t, testkit.LoseReply, "pgxlock_share_held")
	shared, err := lock.Downgrade(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	lost.Happened(t)
	if found, err := locks.Holders(t.Context(), "k"); err != nil || len(found) != 1 || found[0].ID != shared.Holder() || found[0].Mode != pgxlock.Shared || found[0].Metadata != "mine" {
		t.Errorf("%v, %v", found, err)
	}
	// The first request made the share, and the second one only found it.
	expires := testkit.Query[time.Time](t, db, "select expires_at from distributed_lock_shares")
	if deadline, _ := shared.Deadline(); deadline.Add(6 * time.Minute).After(expires) {
		t.Errorf("the deadline is %s, and with a margin of a tenth later than the expiry %s", deadline, expires)
	}
	testkit.Release(t, testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k", pgxlock.Shared))
	testkit.Release(t, shared)
	testkit.Release(t, testkit.Acquire(t, locks, "k", pgxlock.NoWait))
}

func TestDowngradeOfAnEvictedLeaseSaysSo(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour}), "k")
	db.Exec(t, fmt.Sprintf("select evict_lock('k', '%s', %d, 'this node is drained')", lock.Holder(), lock.Token()))
	if _, err := lock.Downgrade(t.Context()); !errors.Is(err, pgxlock.ErrEvicted) || !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("Downgrade: %v", err)
	}
}

// Until the transaction that fenced the lock has ended, it may write as if nobody read.
func TestDowngradeDuringAFencedTransactionFailsAndReleases(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour})
	lock := testkit.Acquire(t, locks, "k")
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.Fence(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	if _, err := lock.Downgrade(t.Context()); err == nil || errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("Downgrade: %v", err)
	}
	if _, err := locks.TryAcquire(t.Context(), "k", pgxlock.Shared); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("a reader beside the transaction: %v", err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	testkit.Release(t, testkit.Acquire(t, locks, "k"))
}

func TestReadersInMemoryDoNotPassAWriter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks := pgxlock.NewMemoryLocker()
		var mu sync.Mutex
		var order []string
		first := testkit.Acquire(t, locks, "k", pgxlock.Shared)
		second := testkit.Acquire(t, locks, "k", pgxlock.Shared, pgxlock.Metadata("two"))
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
		testkit.Release(t, first)
		synctest.Wait()
		if len(order) != 0 {
			t.Errorf("%q have it beside a reader", order)
		}
		began := time.Now()
		testkit.Release(t, second)
		all.Wait()
		if want := []string{"writer", "reader", "reader", "writer"}; !slices.Equal(order, want) || time.Since(began) != 3*time.Minute {
			t.Errorf("%q after %s", order, time.Since(began))
		}
		if err := locks.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}
