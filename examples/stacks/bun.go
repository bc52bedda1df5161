package stacks

import (
	"context"
	"fmt"
	"time"

	"github.com/uptrace/bun"

	"github.com/pgxlock/pgxlock"
)

// BookWithBun books a seat with bun.
func BookWithBun(ctx context.Context, db *bun.DB, event int64, guest string) error {
	return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		if err := pgxlock.LockSQLTx(ctx, tx, fmt.Sprintf("event:%d", event), pgxlock.MaxWait(2*time.Second)); err != nil {
			return err
		}
		taken, err := tx.NewSelect().Model((*Booking)(nil)).Where("event = ?", event).Count(ctx)
		if err != nil {
			return err
		}
		if taken >= Seats {
			return ErrFull
		}
		_, err = tx.NewInsert().Model(&Booking{Event: event, Guest: guest}).Exec(ctx)
		return err
	})
}

// SettleWithBun settles a day in one fenced transaction under a lease.
func SettleWithBun(ctx context.Context, db *bun.DB, locks *pgxlock.Locker, day time.Time, total int64) error {
	begin := func(ctx context.Context) (bun.Tx, error) { return db.BeginTx(ctx, nil) }
	return pgxlock.DoSQLTx(ctx, locks, "settle:"+day.Format(time.DateOnly), begin, func(ctx context.Context, tx bun.Tx, _ *pgxlock.Lock) error {
		_, err := tx.NewRaw("INSERT INTO settlements (day, total) VALUES (?, ?)", day, total).Exec(ctx)
		return err
	})
}
