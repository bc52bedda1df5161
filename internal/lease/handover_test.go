package lease

import (
	"context"
	"errors"
	"maps"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A handingQueue leaves so many releases to the test, which is the next caller.
type handingQueue struct {
	noQueue
	left chan hold.Release
}

func (q handingQueue) HandOver(_ lockkey.Name, r hold.Release) bool {
	select {
	case q.left <- r:
		return true
	default:
		return false
	}
}

// leaving releases the locks, each of which is left to the next caller, and returns the releases and how they end.
func leaving(t *testing.T, table *Table, locks ...*hold.Hold) (releases []hold.Release, ended []<-chan error) {
	t.Helper()
	for _, lock := range locks {
		q := handingQueue{left: make(chan hold.Release, 1)}
		table.host.Queue = q
		end := make(chan error, 1)
		go func() { end <- table.Release(lock) }()
		releases, ended = append(releases, <-q.left), append(ended, end)
		q.left <- nil // no more
	}
	return releases, ended
}

// finish tries for the lease with the release that was left.
func finish(ctx context.Context, table *Table, key string, r hold.Release, metadata *string) (*hold.Hold, error) {
	attempts := []hold.Attempt{{Hold: newHold(table, key)}}
	table.Try(ctx, hold.Request{TTL: table.cfg.TTL, Metadata: metadata, Turn: hold.Turn{Handed: true, Release: r}}, attempts)
	return attempts[0].Hold, attempts[0].Err
}

func TestLeaseIsReleasedAndAcquiredInOneCommit(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, db batchDB, _ *wires, table *Table) {
		db.Exec(t, `create table changes (what text, xid xid8 default pg_current_xact_id());
			create function changed() returns trigger language plpgsql as $$ begin insert into changes values (tg_op); return null; end $$;
			create trigger changed after insert or delete on distributed_locks for each row execute function changed()`)
		first := take(t, table, "k")[0]
		releases, ended := leaving(t, table, first)
		next, err := finish(context.Background(), table, "k", releases[0], nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := pgtest.Receive(t, "the end of the release", ended[0]); err != nil {
			t.Error(err)
		}
		if next.Token <= first.Token {
			t.Errorf("token %d after %d", next.Token, first.Token)
		}
		db.wantHeld(t, "", next)
		var ways, commits int
		if err := db.Pool.QueryRow(t.Context(), "select count(*), count(distinct xid) from changes").Scan(&ways, &commits); err != nil || ways != 3 || commits != 2 {
			t.Errorf("%d changes in %d commits, want 3 in 2: %v", ways, commits, err)
		}
	})
}

func TestReleaseThatIsLeftEndsWhateverBecomesOfTheNextCaller(t *testing.T) {
	t.Parallel()
	ended, end := context.WithCancel(context.Background())
	end()
	broken := "{"
	for name, c := range map[string]struct {
		before   func(t *testing.T, db batchDB) (after func())
		ctx      context.Context
		metadata *string
		lost     string // which statement gets no answer
		left     bool   // the next caller leaves without a try
		refused  error  // why the next try fails
		sqlstate string // or how
		released error
	}{
		"it leaves":              {left: true},
		"its context has ended":  {ctx: ended, refused: context.Canceled},
		"its metadata is broken": {metadata: &broken, sqlstate: "22P02"},
		"the lease was evicted": {before: func(t *testing.T, db batchDB) func() {
			t.Helper()
			db.Exec(t, "delete from distributed_locks")
			return func() {}
		}, refused: lockerr.ErrNotAcquired, released: lockerr.ErrLost},
		"a transaction has fenced it": {before: func(t *testing.T, db batchDB) func() {
			t.Helper()
			tx, err := db.Pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), "select assert_lock_held('k', holder_id) from distributed_locks"); err != nil {
				t.Fatal(err)
			}
			return func() { _ = tx.Rollback(context.Background()) }
		}, refused: lockerr.ErrNotAcquired},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newBatchDB(t)
			table := db.table(t, db.Pool)
			first := take(t, table, "k")[0]
			after := func() {}
			if c.before != nil {
				after = c.before(t, db)
			}
			releases, released := leaving(t, table, first)
			if c.left {
				releases[0].Return()
			} else {
				ctx := c.ctx
				if ctx == nil {
					ctx = context.Background()
				}
				if _, err := finish(ctx, table, "k", releases[0], c.metadata); err == nil || !errors.Is(err, c.refused) && lockerr.SQLState(err) != c.sqlstate {
					t.Errorf("the next try: %v, want %v", err, c.refused)
				}
			}
			after()
			if err := pgtest.Receive(t, "the end of the release", released[0]); !errors.Is(err, c.released) {
				t.Errorf("the release: %v, want %v", err, c.released)
			}
			table.flow.wait()
			table.cleaning.Wait()
			db.wantHeld(t, "")
		})
	}
}

// The server may have released the lease and granted it to the next caller, or neither.
func TestLostAnswerOfAHandoverLeavesNoLeaseThatNobodyOwns(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	eachWay(t, func(t *testing.T, db batchDB, w *wires, table *Table) {
		for answers, all := -1, false; !all; answers++ {
			first := take(t, table, "k")[0]
			releases, released := leaving(t, table, first)
			w.lose(first.Holder, answers, nil)
			next, err := finish(context.Background(), table, "k", releases[0], nil)
			if err := pgtest.Receive(t, "the end of the release", released[0]); err != nil {
				t.Errorf("%d messages: the release: %v", answers, err)
			}
			w.mu.Lock()
			all = w.all
			w.mu.Unlock()
			table.flow.wait()
			table.cleaning.Wait()
			switch {
			case err == nil:
				db.wantHeld(t, "granted: ", next)
			case !errors.Is(err, lockerr.ErrNotAcquired):
				t.Errorf("%d messages: the next caller: %v", answers, err)
			default:
				db.wantHeld(t, "refused: ")
			}
			db.Exec(t, "delete from distributed_locks")
		}
	})
}

// The answer was that of the server, which has released the lease.
func TestReleaseWhoseHandoverWasNotReplicatedIsNoLoss(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	eachWay(t, func(t *testing.T, db batchDB, w *wires, table *Table) {
		first := take(t, table, "k")[0]
		releases, released := leaving(t, table, first)
		w.leaveUnreplicated(first.Holder)
		if _, err := finish(context.Background(), table, "k", releases[0], nil); !errors.Is(err, dbconn.ErrNotReplicated) {
			t.Errorf("the next caller: %v", err)
		}
		if err := pgtest.Receive(t, "the end of the release", released[0]); err != nil {
			t.Errorf("the release: %v", err)
		}
		table.flow.wait()
		table.cleaning.Wait()
		db.wantHeld(t, "")
	})
}

func TestRequestsBesideAHandoverHaveAnAnswerWithoutAConnection(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	eachWay(t, func(t *testing.T, _ batchDB, w *wires, table *Table) {
		first := take(t, table, "k")[0]
		releases, released := leaving(t, table, first)
		next, other := requested(table, "k"), requested(table, "other")
		next.lock.Holder, next.from = "next", releases[0].(*release)
		w.lose(first.Holder, -1, func() error {
			return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: lockerr.StateNoRights}
		})
		table.flow.ask(false, next, other)
		answered(t, next.Answered())
		answered(t, other.Answered())
		if next.Err() == nil {
			t.Error("the next caller has the lock without an answer")
		}
		_ = pgtest.Receive(t, "the end of the release", released[0])
	})
}

func TestManyReleasesThatAreLeftAreOneBatch(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newBatchDB(t)
	table := db.table(t, db.Pool)
	locks := take(t, table, "a", "b", "c")
	releases, released := leaving(t, table, locks...)
	var requests []*request
	for i, lock := range locks {
		r := requested(table, lock.Key)
		r.lock.Holder, r.from = "next", releases[i].(*release)
		requests = append(requests, r)
	}
	askFor(t, table, requests...)
	holders := make(map[string]string)
	for i, r := range requests {
		wantGranted(t, r)
		holders[r.lock.Key] = r.lock.Holder
		if err := pgtest.Receive(t, "the end of the release", released[i]); err != nil {
			t.Error(err)
		}
	}
	if held := db.held(t); !maps.Equal(held, holders) {
		t.Errorf("held are %v, want %v", held, holders)
	}
}
