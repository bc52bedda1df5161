package lockerr

import (
	"errors"
	"fmt"
)

// NoLocks returns the error of a server that grants advisory locks to every caller. engine is what
// the server says that it is; empty: it is not known.
func NoLocks(engine string) error {
	return fmt.Errorf("the server%s grants advisory locks and does not keep them, so no lock, and no fence, would exclude anybody; use PostgreSQL: %s: %w", named(engine), ManualEngines, errors.ErrUnsupported)
}

// NotPostgres adds to err that the server is no PostgreSQL, if the server refused, because it does not
// know, what every PostgreSQL has, unless err says more. engine is as in NoLocks.
func NotPostgres(engine string, err error) error {
	if errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	switch SQLState(err) {
	case StateUndefinedTable, StateUndefinedFunction, StateUndefinedObject, StateInvalidSchema, StateUnsupported, StateSyntax:
		return fmt.Errorf("%w: the server%s lacks a part of PostgreSQL that locks need; use PostgreSQL: %s: %w", errors.ErrUnsupported, named(engine), ManualEngines, err)
	}
	return err
}

func named(engine string) string {
	if engine == "" {
		return ""
	}
	return fmt.Sprintf(" (%.100s)", engine)
}
