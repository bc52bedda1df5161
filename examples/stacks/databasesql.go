package stacks

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// LockerBeside makes the Locker of a program that opens its database with
// database/sql, GORM or sqlx, from the connection string that it has for that. Leave
// out what only lib/pq knows, such as binary_parameters: the server refuses it.
func LockerBeside(ctx context.Context, connString string) (*pgxlock.Locker, error) {
	pool, err := pgxpool.New(ctx, connString) // connects only when it is used
	if err != nil {
		return nil, err
	}
	defer pool.Close() // the Locker has its configuration, and takes no connection from it
	return pgxlock.NewLeaseLocker(pool, nil)
}

// BookWithSQL books a seat with database/sql.
func BookWithSQL(ctx context.Context, db *sql.DB, event int64, guest string) error {
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return err
	}
	defer tx.Rollback()

	if err := pgxlock.LockSQLTx(ctx, tx, fmt.Sprintf("event:%d", event), pgxlock.MaxWait(2*time.Second)); err != nil {
		return err // pgxlock.ErrNotAcquired: still busy after 2 s; tx could go on
	}
	var taken int
	if err := tx.QueryRowContext(ctx, "SELECT count(*) FROM bookings WHERE event = $1", event).Scan(&taken); err != nil {
		return err
	}
	if taken >= Seats {
		return ErrFull
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO bookings (event, guest) VALUES ($1, $2)", event, guest); err != nil {
		return err
	}
	return tx.Commit() // and unlock
}

// BookWithSQLAlone books a seat without this package, as one would in any other
// language.
func BookWithSQLAlone(ctx context.Context, db *sql.DB, event int64, guest string) error {
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return err
	}
	defer tx.Rollback()

	var locked bool
	if err := tx.QueryRowContext(ctx, "SELECT lock_tx($1, '2 seconds')", fmt.Sprintf("event:%d", event)).Scan(&locked); err != nil {
		return err
	}
	if !locked {
		return ErrBusy // tx could go on
	}
	var taken int
	if err := tx.QueryRowContext(ctx, "SELECT count(*) FROM bookings WHERE event = $1", event).Scan(&taken); err != nil {
		return err
	}
	if taken >= Seats {
		return ErrFull
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO bookings (event, guest) VALUES ($1, $2)", event, guest); err != nil {
		return err
	}
	return tx.Commit()
}

// ShipOnce ships an order, unless a transaction that has committed did. It waits
// for one that is just doing it.
func ShipOnce(ctx context.Context, db *sql.DB, order int64) (first bool, err error) {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	defer tx.Rollback()

	first, err = pgxlock.ClaimSQLTx(ctx, tx, fmt.Sprintf("order:%d:ship", order))
	if err != nil || !first {
		return false, err // not first: it is shipped
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO shipments (order_id) VALUES ($1)", order); err != nil {
		return false, err
	}
	return true, tx.Commit()
}

// SettleFenced settles a day under a lease, for as long as a slow service takes
// to say what to write, and writes it unless somebody has taken the lease over.
// locks is of the same database.
func SettleFenced(ctx context.Context, db *sql.DB, locks *pgxlock.Locker, day time.Time, slow func(context.Context) (total int64, err error)) error {
	return locks.Do(ctx, "settle:"+day.Format(time.DateOnly), func(ctx context.Context, lock *pgxlock.Lock) error {
		total, err := slow(ctx)
		if err != nil {
			return err
		}
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()

		if err := lock.FenceSQL(ctx, tx); err != nil {
			return err // pgxlock.ErrLost: the lease is somebody else's, who may have written
		}
		if _, err := tx.ExecContext(ctx, "INSERT INTO settlements (day, total) VALUES ($1, $2)", day, total); err != nil {
			return err
		}
		return tx.Commit()
	})
}
