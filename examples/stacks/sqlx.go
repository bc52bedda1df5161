package stacks

import (
	"context"
	"fmt"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/pgxlock/pgxlock"
)

// BookWithSQLX books a seat with sqlx.
func BookWithSQLX(ctx context.Context, db *sqlx.DB, event int64, guest string) error {
	tx, err := db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()

	if err := pgxlock.LockSQLTx(ctx, tx, fmt.Sprintf("event:%d", event), pgxlock.MaxWait(2*time.Second)); err != nil {
		return err
	}
	var taken int
	if err := tx.GetContext(ctx, &taken, "SELECT count(*) FROM bookings WHERE event = $1", event); err != nil {
		return err
	}
	if taken >= Seats {
		return ErrFull
	}
	_, err = tx.NamedExecContext(ctx, "INSERT INTO bookings (event, guest) VALUES (:event, :guest)", Booking{Event: event, Guest: guest})
	if err != nil {
		return err
	}
	return tx.Commit()
}
