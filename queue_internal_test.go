package pgxlock

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// StopRefreshing makes a Locker check none of its tickets automatically until its next one
// is there.
func (l *Locker) StopRefreshing() {
	l.lines.mu.Lock()
	defer l.lines.mu.Unlock()
	l.queue.timer.Stop()
}

// runs is a runner whose exchanges reach the server.
type runs func(dbconn.Exchange) error

func (r runs) Do(fn dbconn.Exchange) error { return r(fn) }
func (r runs) Reached() bool               { return true }

// Tickets become void while an earlier one is being published: by turns that take less
// time than that.
func TestVoidTicketsAreNeitherSentNorKept(t *testing.T) {
	t.Parallel()
	l := newLocker(KindLease, clock.System, clock.DefaultBackoff, slog.New(slog.DiscardHandler))
	sent, reply := make(chan struct{}, 10), make(chan struct{})
	q := newQueue(l, &dbconn.Installation{Schema: "s"}, "owner", runs(func(dbconn.Exchange) error {
		sent <- struct{}{}
		<-reply
		return errors.New("refused")
	}), nil, dbconn.Dialer{})
	q.listener.stop() // it has nowhere to listen
	name := lockkey.Name{Key: "k"}
	front := l.lines.join(name, &hold.Busy{}, nil, hold.Exclusive)
	q.stand(front.line)
	<-sent
	for range 1000 {
		next := l.lines.join(name, &hold.Busy{}, nil, hold.Exclusive)
		front.granted(0, true)
		l.lines.Freed(name)
		if n := q.publishing.Queued(); n > 1 {
			t.Fatalf("%d tickets of one line are to be sent", n)
		}
		front = next
	}
	for range 1000 { // each makes a line of its own
		front.leave()
		front = l.lines.join(name, &hold.Busy{}, nil, hold.Exclusive)
		q.stand(front.line)
		if n := q.publishing.Queued(); n > 1 {
			t.Fatalf("%d tickets are to be sent, of one line that is left", n)
		}
	}
	front.leave()
	close(reply)
	select {
	case <-q.publishing.Done():
	case <-time.After(time.Minute):
		t.Fatal("what is to be sent does not end")
	}
	select {
	case <-sent:
		t.Error("a void ticket was sent")
	default:
	}
}

// A Locker may wait for thousands of advisory locks at once, each of which it sees again
// with every refusal.
func TestManyContendedLocksCostTheQueueNoMoreEachThanFew(t *testing.T) {
	t.Parallel()
	l := newLocker(KindAdvisory, clock.System, clock.DefaultBackoff, slog.New(slog.DiscardHandler))
	perSight := func(locks int) time.Duration {
		best := time.Hour
		for range 10 {
			q := newQueue(l, &dbconn.Installation{}, "owner", nil, nil, dbconn.Dialer{})
			began := time.Now()
			for range 4 {
				for n := range locks {
					q.seeLocked(lockkey.Name{ID: lockkey.ID{Number: int64(n)}})
				}
			}
			best = min(best, time.Since(began)/time.Duration(4*locks))
		}
		return best
	}
	if few, many := max(perSight(maxTickets/2), time.Microsecond), perSight(4*maxTickets); many > 50*few { // it was 200 µs when each sight looked at all
		t.Errorf("%s each for few locks, %s for many", few, many)
	}
	q := newQueue(l, &dbconn.Installation{}, "owner", nil, nil, dbconn.Dialer{})
	for round := range 10 {
		for name := range q.others {
			q.others[name] = time.Now().Add(-contendedFor)
		}
		for n := range maxTickets {
			q.seeLocked(lockkey.Name{ID: lockkey.ID{Number: int64(round*maxTickets + n)}})
		}
	}
	if n := len(q.others); n > 3*maxTickets {
		t.Errorf("%d locks are remembered, most of which nobody else wants any more", n)
	}
}

// acquiring runs an Acquire beside the test.
func acquiring(ctx context.Context, locks *Locker, key string, opts ...Option) <-chan tried {
	done := make(chan tried, 1)
	go func() {
		lock, err := locks.Acquire(ctx, key, opts...)
		done <- tried{lock, err}
	}()
	return done
}

// The ticket of a wait that ended is in the table until it is removed from there.
func TestSharedTryIsNotRefusedByAVoidTicketOfItsOwnLocker(t *testing.T) {
	t.Parallel()
	for kind, newLocker := range map[string]func(*pgtest.DB) (*Locker, error){
		"lease":    func(db *pgtest.DB) (*Locker, error) { return NewLeaseLocker(db.Pool, nil) },
		"advisory": func(db *pgtest.DB) (*Locker, error) { return NewAdvisoryLocker(db.Pool, nil) },
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
				t.Fatal(err)
			}
			locks, err := newLocker(db)
			if err != nil {
				t.Fatal(err)
			}
			defer locks.Close(context.Background())
			q, name := locks.queue, locks.name("k")
			resume, withdraw := make(chan struct{}), q.withdrawing.Run
			q.withdrawing.Run = func(batch []*ticket) error {
				<-resume
				return withdraw(batch)
			}
			reading, err := locks.Acquire(t.Context(), "k", Shared)
			if err != nil {
				t.Fatal(err)
			}
			ctx, leave := context.WithCancel(t.Context())
			writer := acquiring(ctx, locks, "k")
			eventually(t, "the writer has a ticket", func() bool {
				q.lines.mu.Lock()
				defer q.lines.mu.Unlock()
				l := q.lines.of[name]
				if l != nil && l.ticket == nil {
					q.enterLocked(l) // of an advisory lock that is held here it needs none by itself
				}
				return l != nil && l.ticket != nil && l.ticket.number != 0 && !l.ticket.pendingLocked()
			})

			leave()
			if got := <-writer; !errors.Is(got.err, context.Canceled) {
				t.Error(got.err)
			}
			try := acquiring(t.Context(), locks, "k", Shared, NoWait)
			var got *tried
			eventually(t, "the try has its answer, or waits for the ticket to be removed", func() bool {
				select {
				case a := <-try:
					got = &a
					return true
				default:
					q.lines.mu.Lock()
					defer q.lines.mu.Unlock()
					return len(q.void[name]) == 1 && q.void[name][0].gone != nil
				}
			})
			close(resume)
			if got == nil {
				a := <-try
				got = &a
			}
			if got.err != nil {
				t.Fatalf("nobody waits, and nobody has it alone: %v", got.err)
			}
			if err := errors.Join(got.lock.Release(t.Context()), reading.Release(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("not yet: %s", what)
		}
	}
}

// The queue of a semaphore has no lease of its own, so that it always looks free: who was
// woken without success would be woken again and again.
func TestWokenWaiterForAPermitIsCheckedOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	config := db.Pool.Config()
	config.MaxConns = 10
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	newLocker := func() *Locker {
		l, err := NewLeaseLocker(pool, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close(context.Background()) })
		return l
	}
	db.Exec(t, "select acquire_permit('jobs', 'all', 1, 600)")
	waker, waiter := newLocker(), newLocker()
	if _, err := waker.Acquire(t.Context(), "else"); err != nil { // knows where all is
		t.Fatal(err)
	}
	s, err := waiter.Semaphore(1)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { _, _ = s.Acquire(ctx, "jobs"); close(ended) }()
	for n := 0; n < 1; time.Sleep(time.Millisecond) {
		if err := db.Pool.QueryRow(t.Context(), "select count(*) from pgxlock_waiters where live_until > clock_timestamp()").Scan(&n); err != nil {
			t.Fatal(err)
		}
	}

	q := waker.queue
	name := lockkey.Name{Key: "jobs#"}
	looks := make(chan bool, 100) // whether there will be another
	run := q.waking.Run
	q.waking.Run = func(batch []wakeUp) error {
		err := run(batch)
		q.lines.mu.Lock()
		_, again := q.woken[name]
		q.lines.mu.Unlock()
		looks <- again
		return err
	}
	q.Wake([]lockkey.Name{name})
	if again := <-looks; !again {
		t.Error("nobody looks whether who was woken sleeps")
	}
	again := true
	for more := 0; more < 20 && again; more++ { // who is woken after its turn, because this machine is slow, is looked after once more
		again = <-looks
	}
	if again {
		t.Error("it is looked after for ever")
	}
	cancel()
	<-ended
}

func TestCheckForTicketsEndsWhenItsLockerIsClosed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLocker(KindAdvisory, nil, nil, slog.New(slog.DiscardHandler))
		answered := make(chan struct{})
		q := newQueue(l, &dbconn.Installation{Schema: "s"}, "owner", runs(func(dbconn.Exchange) error {
			<-answered
			return ErrClosed
		}), nil, dbconn.Dialer{})
		checked := make(chan []bool, 1)
		go func() { checked <- q.WaitedFor(t.Context(), []lockkey.Name{l.name("k")}) }()
		synctest.Wait()
		l.calls.Close()
		synctest.Wait()
		select {
		case waited := <-checked:
			if len(waited) != 1 || waited[0] {
				t.Errorf("waited for: %v", waited)
			}
		default:
			t.Error("the check goes on until the server answers")
		}
		close(answered)
	})
}
