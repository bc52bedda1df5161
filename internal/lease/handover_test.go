package lease

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// leftTo returns a request for a key to which a release of the key was left, and that release.
func leftTo(table *Table, held *hold.Hold) (*request, *release) {
	r := &release{table: table, lock: held, token: &held.Token, done: make(chan struct{}), handed: true}
	next := requested(table, held.Key)
	next.lock.Holder, next.from = "next holder of "+held.Key, r
	return next, r
}

func TestRequestsOfABatchWithAHandoverHaveAnAnswerWithoutAConnection(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, _ batchDB, w *wires, table *Table) {
		next, left := leftTo(table, take(t, table, "k")[0])
		other := requested(table, "other")
		w.lose("next holder of k", -1, func() error {
			return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: lockerr.StateNoRights}
		})
		table.flow.ask(false, next, other)
		answered(t, next.Answered())
		answered(t, other.Answered())
		if next.Err() == nil {
			t.Error("the next caller has the lock without an answer")
		}
		pgtest.Receive(t, "the release", left.done)
	})
}

func TestReleaseThatWasLeftToARefusedRequestIsSentAlone(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, db batchDB, _ *wires, table *Table) {
		next, left := leftTo(table, take(t, table, "k")[0])
		noJSON := "{"
		next.metadata = &noJSON
		table.flow.ask(false, next)
		answered(t, next.Answered())
		if got := lockerr.SQLState(next.Err()); got != "22P02" {
			t.Errorf("the next caller: %v", next.Err())
		}
		pgtest.Receive(t, "the release", left.done)
		if left.err != nil || left.outcome != outcomeReleased || left.handed {
			t.Errorf("the release: %c, %v, handed: %t", left.outcome, left.err, left.handed)
		}
		db.wantHeld(t, "")
	})
}

// The server may have released the lock and granted it to the next caller, or neither.
func TestLostAnswerOfAHandoverLeavesNoLeaseThatNobodyOwns(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, db batchDB, w *wires, table *Table) {
		for answers, all := -1, false; !all; answers++ {
			next, left := leftTo(table, take(t, table, "k")[0])
			w.lose("next holder of k", answers, nil)
			table.flow.ask(false, next)
			answered(t, next.Answered())
			pgtest.Receive(t, "the release", left.done)
			w.mu.Lock()
			all = w.all
			w.mu.Unlock()
			if left.err != nil || left.outcome != outcomeReleased {
				t.Errorf("%d messages: the release: %c, %v", answers, left.outcome, left.err)
			}
			table.flow.wait()
			table.cleaning.Wait()
			if next.Err() == nil {
				db.wantHeld(t, "granted: ", next.lock)
			} else {
				if !errors.Is(next.Err(), lockerr.ErrNotAcquired) {
					t.Errorf("%d messages: the next caller: %v", answers, next.Err())
				}
				db.wantHeld(t, "refused: ")
			}
			db.Exec(t, "delete from distributed_locks")
		}
	})
}

func TestHandoverAcquiresNothingUnlessItReleases(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, db batchDB, _ *wires, table *Table) {
		held := take(t, table, "k")[0]
		db.Exec(t, "delete from distributed_locks") // as an eviction
		next, left := leftTo(table, held)
		table.flow.ask(false, next)
		answered(t, next.Answered())
		pgtest.Receive(t, "the release", left.done)
		if left.outcome != outcomeGone || !errors.Is(next.Err(), lockerr.ErrNotAcquired) {
			t.Errorf("the release: %c; the next caller: %v", left.outcome, next.Err())
		}
		db.wantHeld(t, "")
	})
}

// The answer was that of the server, which has released the lease.
func TestReleaseWhoseHandoverWasNotReplicatedIsNoLoss(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, db batchDB, w *wires, table *Table) {
		held := take(t, table, "k")[0]
		queue := &oneWaiter{released: make(chan hold.Release, 1)}
		table.host.Queue = queue
		released := make(chan error, 1)
		go func() { released <- table.Release(held) }()
		next := requested(table, "k")
		next.lock.Holder = "next holder of k"
		next.from, _ = pgtest.Receive(t, "a release", queue.released).(*release)
		w.leaveUnreplicated("next holder of k")
		table.flow.ask(false, next)
		answered(t, next.Answered())
		if !errors.Is(next.Err(), dbconn.ErrNotReplicated) {
			t.Errorf("the next caller: %v", next.Err())
		}
		if err := pgtest.Receive(t, "the release", released); err != nil {
			t.Errorf("the release: %v", err)
		}
		table.cleaning.Wait()
		db.wantHeld(t, "")
	})
}

// oneWaiter is a queue with one caller, to which the first release is left.
type oneWaiter struct {
	noQueue
	left     atomic.Bool
	released chan hold.Release
}

func (q *oneWaiter) HandOver(_ lockkey.Name, r hold.Release) bool {
	if q.left.Swap(true) {
		return false
	}
	q.released <- r
	return true
}

func TestHandoversOfABatchAreReleasedBeforeTheyAreAcquired(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, db batchDB, _ *wires, table *Table) {
		held := take(t, table, "k", "l")
		first, one := leftTo(table, held[0])
		second, other := leftTo(table, held[1])
		table.flow.ask(false, first, second)
		answered(t, first.Answered())
		answered(t, second.Answered())
		wantGranted(t, first)
		wantGranted(t, second)
		for _, left := range []*release{one, other} {
			pgtest.Receive(t, "a release", left.done)
			if left.outcome != outcomeReleased || !left.handed {
				t.Errorf("the release: %c, handed: %t", left.outcome, left.handed)
			}
		}
		db.wantHeld(t, "", first.lock, second.lock)
	})
}
