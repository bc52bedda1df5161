package pgxlock

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// StopRefreshing makes a Locker check none of its tickets automatically until its next one
// is there.
func (l *Locker) StopRefreshing() {
	l.lines.mu.Lock()
	defer l.lines.mu.Unlock()
	l.queue.timer.Stop()
}

// Tickets become void while an earlier one is being published: by turns that take less
// time than that.
func TestVoidTicketsAreNeitherSentNorKept(t *testing.T) {
	t.Parallel()
	l := newLocker(KindLease, clock.System, defaultBackoff, slog.New(slog.DiscardHandler))
	sent, reply := make(chan struct{}, 10), make(chan struct{})
	q := newQueue(l, &dbconn.Installation{Schema: "s"}, "owner", func(dbconn.Exchange) error {
		sent <- struct{}{}
		<-reply
		return errors.New("refused")
	}, func() bool { return true }, dbconn.Dialer{})
	q.listener.stop() // it has nowhere to listen
	name := lockkey.Name{Key: "k"}
	front := l.lines.join(name, &busyError{}, nil, Exclusive)
	q.stand(front.line)
	<-sent
	for range 1000 {
		next := l.lines.join(name, &busyError{}, nil, Exclusive)
		front.granted(0, true)
		l.lines.freed(name)
		if n := q.publishing.Queued(); n > 1 {
			t.Fatalf("%d tickets of one line are to be sent", n)
		}
		front = next
	}
	for range 1000 { // each makes a line of its own
		front.leave()
		front = l.lines.join(name, &busyError{}, nil, Exclusive)
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
	l := newLocker(KindAdvisory, clock.System, defaultBackoff, slog.New(slog.DiscardHandler))
	perSight := func(locks int) time.Duration {
		best := time.Hour
		for range 10 {
			q := newQueue(l, &dbconn.Installation{}, "owner", nil, nil, dbconn.Dialer{})
			began := time.Now()
			for range 4 {
				for n := range locks {
					q.see(lockkey.Name{ID: lockkey.ID{Number: int64(n)}})
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
			q.see(lockkey.Name{ID: lockkey.ID{Number: int64(round*maxTickets + n)}})
		}
	}
	if n := len(q.others); n > 3*maxTickets {
		t.Errorf("%d locks are remembered, most of which nobody else wants any more", n)
	}
}
