package lockerr

import (
	"errors"
	"fmt"
)

// Typed adds the sentinel that an error of the server stands for, if any.
func Typed(err error) error {
	if errors.Is(err, ErrUnavailable) {
		return err // it was typed before
	}
	if Unreachable(err) {
		return as(ErrUnavailable, err)
	}
	if _, said := errors.AsType[*deniedError](err); said {
		return err
	}
	if _, says := errors.AsType[*RefusedError](err); says {
		return err
	}
	if remedy := Remedy(err); remedy != "" {
		return &deniedError{err, remedy}
	}
	if lacksSchema(err) {
		return as(ErrSchema, err)
	}
	var sentinel error
	switch SQLState(err) {
	case StateNotHeld:
		sentinel = ErrLost
	case StateStaleSnapshot:
		sentinel = ErrStaleSnapshot
	case StateReadOnly:
		sentinel = ErrReadOnly
	case StateDeadlock:
		sentinel = ErrDeadlock
	case StateOutOfMemory:
		return &deniedError{err, "the server's lock table may be full: lock fewer keys at a time, or raise its max_locks_per_transaction"}
	case StateAborted:
		return &deniedError{err, "an earlier statement failed: roll back"}
	default:
		return err
	}
	return as(sentinel, err)
}

// OnStandby makes err match ErrReadOnly if it is how a standby refuses a transaction that is
// to write, or an unlogged table.
func OnStandby(err error) error {
	if SQLState(err) == StateUnsupported {
		return fmt.Errorf("%w (%w)", ErrReadOnly, err)
	}
	return err
}

// lacksSchema reports whether the server misses something that the migrations make, or
// that repair_lock_tokens() mends.
func lacksSchema(err error) bool {
	if errors.Is(err, errors.ErrUnsupported) {
		return false // what it misses is a part of PostgreSQL
	}
	switch SQLState(err) {
	case StateTokensNeedRepair, StateTokensUsedUp, StateUndefinedTable, StateUndefinedFunction, StateUndefinedObject, StateInvalidSchema:
		return true
	}
	return false
}

// A deniedError says what to do about what the server refuses.
type deniedError struct {
	err    error
	remedy string
}

func (e *deniedError) Error() string { return e.err.Error() + "; " + e.remedy }
func (e *deniedError) Unwrap() error { return e.err }

// as makes err match a sentinel.
func as(sentinel, err error) error {
	if errors.Is(err, sentinel) {
		return err // it was typed before
	}
	return fmt.Errorf("%w: %w", sentinel, err)
}
