package usertx

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// Elsewhere adds to the error of a fence where the lock is, if the transaction may
// be somewhere else. It is not refused before: through a pooler one database can
// have two names.
func Elsewhere(err error, tx interface{ Database() string }, config *pgconn.Config) error {
	if !errors.Is(err, lockerr.ErrLost) && !errors.Is(err, lockerr.ErrSchema) {
		return err
	}
	here := PlaceOf(config)
	switch there := tx.Database(); there {
	case "":
		return fmt.Errorf("%w (the lock is in database %s)", err, here)
	case here:
		return err
	default:
		return fmt.Errorf("%w (tx is on database %s, the lock in %s)", err, there, here)
	}
}
