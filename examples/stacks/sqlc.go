package stacks

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/pgxlock/pgxlock"
)

// Queries is what sqlc makes, for database/sql, of two queries.
type Queries struct{ db dbtx }

type dbtx interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

// NewQueries returns the queries on a database.
func NewQueries(db dbtx) *Queries { return &Queries{db} }

// WithTx returns the queries in a transaction.
func (q *Queries) WithTx(tx *sql.Tx) *Queries { return &Queries{tx} }

// CountBookings counts the bookings of an event.
func (q *Queries) CountBookings(ctx context.Context, event int64) (count int64, err error) {
	err = q.db.QueryRowContext(ctx, "SELECT count(*) FROM bookings WHERE event = $1", event).Scan(&count)
	return count, err
}

// InsertBooking books a seat.
func (q *Queries) InsertBooking(ctx context.Context, event int64, guest string) error {
	_, err := q.db.ExecContext(ctx, "INSERT INTO bookings (event, guest) VALUES ($1, $2)", event, guest)
	return err
}

// BookWithSQLC books a seat with the queries of sqlc.
func BookWithSQLC(ctx context.Context, db *sql.DB, event int64, guest string) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()

	if err := pgxlock.LockSQLTx(ctx, tx, fmt.Sprintf("event:%d", event), pgxlock.MaxWait(2*time.Second)); err != nil {
		return err
	}
	queries := NewQueries(db).WithTx(tx)
	taken, err := queries.CountBookings(ctx, event)
	if err != nil {
		return err
	}
	if taken >= Seats {
		return ErrFull
	}
	if err := queries.InsertBooking(ctx, event, guest); err != nil {
		return err
	}
	return tx.Commit()
}
