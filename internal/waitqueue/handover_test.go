package waitqueue

import (
	"context"
	"testing"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A Locker of advisory locks needs no tables.
func TestTurnThatEndsEarlySendsNothingWithoutATableForTickets(t *testing.T) {
	t.Parallel()
	q := newLocal()
	sent := make(chan struct{}, 10)
	q.Connect(Server{Owner: "owner", Place: &dbconn.Installation{}, Leaders: nobody{}, Runner: runs(func(dbconn.Exchange) error {
		sent <- struct{}{}
		return nil
	})})
	q.listener.stop()
	name := lockkey.Name{ID: lockkey.Identify("k")}
	var first, next Waiter
	q.Begin(t.Context(), &first, hold.Request{}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	q.Begin(ctx, &next, hold.Request{}, nil)
	first.Enqueue(name, theirs)
	next.Enqueue(name, theirs)
	first.Turn()
	first.Granted()
	next.position.rest(true)
	if !q.HandOver(name, nil) {
		t.Fatal("the lock is not left to the next caller")
	}
	cancel()
	next.End()
	<-q.waking.Done()
	if len(sent) > 0 {
		t.Error("a statement is sent that needs a table which is not there")
	}
}
