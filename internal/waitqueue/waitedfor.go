package waitqueue

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A ticketCheck is a question whether other processes wait for some locks.
type ticketCheck struct {
	names  []lockkey.Name
	waited []bool        // for each of them
	done   chan struct{} // closed when waited is known
}

// WaitedFor reports for which of the locks other processes have a ticket. If it cannot find
// out before ctx ends or the Locker is closed, it reports none: a queue that fails must not
// keep callers from a free lock.
func (q *Queue) WaitedFor(ctx context.Context, names []lockkey.Name) []bool {
	nobody := make([]bool, len(names))
	if !q.installed() {
		return nobody
	}
	c := &ticketCheck{names: names, waited: nobody, done: make(chan struct{})}
	q.checking.Add(c)
	select {
	case <-c.done:
		return c.waited
	case <-ctx.Done():
	case <-q.config.Closing.Done():
	}
	return nobody
}

// check asks the server about a batch.
func (q *Queue) check(batch []*ticketCheck) error {
	var kinds []int32
	var names []string
	for _, c := range batch {
		for _, name := range c.names {
			kinds, names = append(kinds, int32(name.Kind())), append(names, name.Text())
		}
	}
	var waited []bool
	err := q.server.Runner.Do(func(ctx context.Context, c dbconn.Querier, _ bool) (err error) {
		waited, err = pgx.CollectRows(c.Query(ctx, q.server.Place.Statement(statements.QueueWaitedFor), kinds, names), pgx.RowTo[bool])
		return err
	})
	if err != nil || len(waited) != len(names) {
		waited = nil
	}
	settleChecks(batch, waited)
	if err != nil && !q.server.Runner.Reached() {
		return err
	}
	return nil
}

// settleChecks answers the callers of a batch. If waited is nil, it reports no waiters.
func settleChecks(batch []*ticketCheck, waited []bool) {
	for _, c := range batch {
		if waited != nil {
			c.waited, waited = waited[:len(c.names)], waited[len(c.names):]
		}
		close(c.done)
	}
}
