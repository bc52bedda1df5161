package stacks

import (
	"context"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/pgxlock/pgxlock"
)

// Booking is a row of bookings, to GORM and to bun.
type Booking struct {
	ID    int64 `bun:",pk,autoincrement"`
	Event int64
	Guest string
}

// BookWithGORM books a seat with GORM.
func BookWithGORM(ctx context.Context, db *gorm.DB, event int64, guest string) error {
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		sqlTx, ok := tx.Statement.ConnPool.(pgxlock.SQLTx)
		if !ok {
			return gorm.ErrInvalidTransaction // never in Transaction
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
