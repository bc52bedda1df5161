package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/pgxlock/pgxlock"
)

// These functions judge what was seen. They return nil, or why the claim is not
// true.

// turn is one stay in the critical section, by the server's clock.
type turn struct {
	Worker  string
	Token   int64
	Inside  int // how many were inside once it had entered
	Entered time.Time
	Left    time.Time
}

// checkExclusive wants as many turns as were reported, none of which overlap.
func checkExclusive(turns []turn, reported int) error {
	if len(turns) != reported {
		return fmt.Errorf("%d turns are on record, %d were reported", len(turns), reported)
	}
	for i, t := range turns {
		if t.Inside != 1 {
			return fmt.Errorf("%d were in the critical section when %s entered", t.Inside, t.Worker)
		}
		if i > 0 && t.Entered.Before(turns[i-1].Left) {
			return fmt.Errorf("%s entered before %s had left", t.Worker, turns[i-1].Worker)
		}
	}
	return nil
}

// checkGrowing wants every turn to have a greater token than the one before.
func checkGrowing(turns []turn) error {
	for i, t := range turns {
		if i > 0 && t.Token <= turns[i-1].Token {
			return fmt.Errorf("%s got token %d after %s had %d", t.Worker, t.Token, turns[i-1].Worker, turns[i-1].Token)
		}
	}
	if len(turns) == 0 || turns[0].Token <= 0 {
		return errors.New("there are no tokens")
	}
	return nil
}

// checkTakeover wants next to have begun when the lease before had expired.
func checkTakeover(before, next pgxlock.Holder) error {
	switch {
	case next.Key != before.Key || next.ID == before.ID:
		return fmt.Errorf("%s still holds %s", before.ID, before.Key)
	case next.Since.Before(before.Expires):
		return fmt.Errorf("it was taken %s before it expired", before.Expires.Sub(next.Since))
	}
	return nil
}

// checkGreater wants the token of the next holder to be greater.
func checkGreater(before, next int64) error {
	if next <= before {
		return fmt.Errorf("token %d came after token %d", next, before)
	}
	return nil
}

// checkLost wants a late holder to have been told that it lost the lock.
func checkLost(late report) error {
	if !late.Lost {
		return fmt.Errorf("%s did not learn of it: %s", late.Worker, orNoError(late.Err))
	}
	return nil
}

// checkRefused wants the server to have refused a late holder with SQLSTATE
// LK001, and the write to have passed where nothing fenced it: else there would
// have been nothing to refuse.
func checkRefused(fenced report, sqlState string, unfenced report) error {
	switch {
	case !fenced.Lost:
		return fmt.Errorf("the fenced write ended with %s", orNoError(fenced.Err))
	case sqlState != stateNotHeld:
		return fmt.Errorf("assert_lock_held ended with SQLSTATE %q", sqlState)
	case unfenced.Err != "":
		return fmt.Errorf("the write fails without a fence as well: %s", unfenced.Err)
	}
	return nil
}

// stateNotHeld is the SQLSTATE of assert_lock_held.
const stateNotHeld = "LK001"

// entry is a row of the ledger.
type entry struct {
	Worker string
	Token  int64
}

// checkLedger wants the holders' writes in the ledger, and nothing else.
func checkLedger(got []entry, want ...entry) error {
	if !slices.Equal(got, want) {
		return fmt.Errorf("written was %v, and %v had the right to", got, want)
	}
	return nil
}

// sqlAndGo is what came of locking one name from SQL and from Go in turns.
type sqlAndGo struct {
	sqlAcquired bool
	goTried     report // while SQL holds it
	sqlReleased bool
	goTook      report
	sqlAgain    bool // while Go holds it
}

// checkMixed wants each to have kept the other out, and Go to have been told who
// was in the way.
func checkMixed(s sqlAndGo, sqlHolder string) error {
	switch {
	case !s.sqlAcquired:
		return errors.New("acquire_lock returned false for a free name")
	case !s.goTried.Busy:
		return fmt.Errorf("in Go, TryAcquire ended with %s while SQL held the lock", orNoError(s.goTried.Err))
	case s.goTried.HeldBy != sqlHolder:
		return fmt.Errorf("in Go, TryAcquire named %q as the holder, which was %q", s.goTried.HeldBy, sqlHolder)
	case !s.sqlReleased:
		return errors.New("release_lock returned false to the holder")
	case s.goTook.Err != "":
		return fmt.Errorf("in Go, TryAcquire of a released lock failed: %s", s.goTook.Err)
	case s.sqlAgain:
		return errors.New("acquire_lock returned true while Go held the lock")
	}
	return nil
}

// held is a lease that must be in the list.
type held struct {
	name   string
	state  pgxlock.LeaseState
	holder string
	token  int64
}

// checkListed wants the list to have exactly these, in the order of their names.
func checkListed(leases []pgxlock.Holder, want []held) error {
	got := make([]held, len(leases))
	for i, l := range leases {
		got[i] = held{l.Key, l.State, l.ID, l.Token}
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("listed is %v, and held is %v", got, want)
	}
	return nil
}

func orNoError(text string) string {
	if text == "" {
		return "no error"
	}
	return text
}
