package stacks

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/pgxlock/pgxlock"
)

// Booking is a row of bookings.
type Booking struct {
	ID    int64
	Event int64
	Guest string
}

// BookWithGORM books a seat with GORM.
func BookWithGORM(ctx context.Context, db *gorm.DB, event int64, guest string) error {
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		sqlTx, err := SQLTx(tx)
		if err != nil {
			return err
		}
		if err := pgxlock.LockSQLTx(ctx, sqlTx, fmt.Sprintf("event:%d", event), pgxlock.MaxWait(2*time.Second)); err != nil {
			return err
		}
		var taken int64
		if err := tx.Model(&Booking{}).Where("event = ?", event).Count(&taken).Error; err != nil {
			return err
		}
		if taken >= Seats {
			return ErrFull
		}
		return tx.Create(&Booking{Event: event, Guest: guest}).Error
	})
}

// SQLTx returns the transaction that tx, which GORM passed to a function of
// yours, runs in.
func SQLTx(tx *gorm.DB) (*sql.Tx, error) {
	pool := tx.Statement.ConnPool
	if prepared, ok := pool.(*gorm.PreparedStmtTX); ok { // with gorm.Config.PrepareStmt
		pool = prepared.Tx
	}
	if sqlTx, ok := pool.(*sql.Tx); ok {
		return sqlTx, nil
	}
	return nil, fmt.Errorf("no transaction: %T", pool)
}

// BookWithGORMAlone books a seat with GORM, and locks by SQL.
func BookWithGORMAlone(ctx context.Context, db *gorm.DB, event int64, guest string) error {
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		var locked bool
		if err := tx.Raw("SELECT lock_tx(?, ?)", fmt.Sprintf("event:%d", event), "2 seconds").Scan(&locked).Error; err != nil {
			return err
		}
		if !locked {
			return ErrBusy
		}
		var taken int64
		if err := tx.Model(&Booking{}).Where("event = ?", event).Count(&taken).Error; err != nil {
			return err
		}
		if taken >= Seats {
			return ErrFull
		}
		return tx.Create(&Booking{Event: event, Guest: guest}).Error
	})
}
