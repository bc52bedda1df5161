package pgxlock

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// This file tells others the names behind the advisory keys that this process holds: of
// a lock the server knows only the number. It is for people, and costs a lock nothing:
// only what is held for long is told, now and then, by the session that listens.

const (
	// nameAfter is how long a lock is held before its name is told.
	nameAfter = 2 * time.Second

	// nameAgain is how often it is told. The table forgets it after an hour.
	nameAgain = 20 * time.Minute

	// maxNames is how many are told at once.
	maxNames = 100
)

// unpublished returns names of locks that are held for some time, and not known yet.
func (a *advisoryLocks) unpublished() []string {
	now := time.Now()
	var names []string
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, h := range a.held {
		if len(names) == maxNames {
			break
		}
		if !h.granted || len(h.locks) == 0 || now.Sub(h.locks[0].since) < nameAfter || !h.named.IsZero() && now.Sub(h.named) < nameAgain {
			continue
		}
		h.named = now
		if key := h.locks[0].key; lockkey.Check(key) == nil { // and not a number
			names = append(names, key)
		}
	}
	return names
}

// publishNames tells them on the connection that listens. What the server says against
// it, for want of a right for one, is nobody's loss.
func (l *listener) publishNames(conn *pgx.Conn) error {
	if l.queue.names == nil || time.Since(l.named) < nameAfter {
		return nil
	}
	l.named = time.Now()
	names := l.queue.names()
	if len(names) == 0 {
		return nil
	}
	err := l.briefly(func(ctx context.Context) error {
		return dbconn.Querier{Conn: conn, Direct: true}.Exec(ctx, l.queue.place.Statement(statements.AdvisoryPublishNames), names)
	})
	if lockerr.SQLState(err) != "" && !conn.IsClosed() {
		l.queue.log.Debug("pgxlock: the names of locks are not published", "locks", len(names), "error", err)
		return nil
	}
	return err
}
