package pgxlock

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A ticketCheck asks whether others wait for some locks.
type ticketCheck struct {
	names  []lockkey.Name
	waited []bool        // for each of them
	done   chan struct{} // closed when waited is known
}

// waitedFor tells for which of the locks others have a ticket: for none where that cannot
// be asked, because a queue that fails keeps nobody from a free lock, and when ctx ends.
func (q *queue) waitedFor(ctx context.Context, names []lockkey.Name) []bool {
	nobody := make([]bool, len(names))
	if !q.place.Installed() {
		return nobody
	}
	c := &ticketCheck{names: names, waited: nobody, done: make(chan struct{})}
	q.checking.Add(c)
	select {
	case <-c.done:
		return c.waited
	case <-ctx.Done():
		return nobody
	}
}

// check asks for a batch.
func (q *queue) check(batch []*ticketCheck) error {
	var kinds []int32
	var names []string
	for _, c := range batch {
		for _, name := range c.names {
			kinds, names = append(kinds, int32(name.Kind())), append(names, name.Text())
		}
	}
	var waited []bool
	err := q.run(func(ctx context.Context, c dbconn.Querier, _ bool) (err error) {
		waited, err = pgx.CollectRows(c.Query(ctx, q.place.Statement(statements.QueueWaitedFor), kinds, names), pgx.RowTo[bool])
		return err
	})
	if err != nil || len(waited) != len(names) {
		waited = nil
	}
	settleChecks(batch, waited)
	if err != nil && !q.reached() {
		return err
	}
	return nil
}

// settleChecks tells the callers of a batch; without waited, that nothing is known.
func settleChecks(batch []*ticketCheck, waited []bool) {
	for _, c := range batch {
		if waited != nil {
			c.waited, waited = waited[:len(c.names)], waited[len(c.names):]
		}
		close(c.done)
	}
}
