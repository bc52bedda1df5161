package advisory

import (
	"errors"
	"testing"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestProcessHasAtMostMaxLocks(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{MaxLocks: 2})
	first := mustAcquire(t, p, "first", hold.Shared)
	mustAcquire(t, p, "second", hold.Exclusive)
	if _, err := p.try(t.Context(), "third", hold.Exclusive); !errors.Is(err, lockerr.ErrMaxLocks) {
		t.Fatalf("a third: %v, want ErrMaxLocks", err)
	}
	again := mustAcquire(t, p, "first", hold.Shared) // the session has that lock already
	if err := errors.Join(first.release(), again.release()); err != nil {
		t.Fatal(err)
	}
	mustAcquire(t, p, "third", hold.Exclusive)
}

func TestHoldsOfOneProcessExcludeEachOtherUnlessAllShare(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	for _, c := range []struct {
		name        string
		held, asked hold.Mode
		granted     bool
	}{
		{"exclusive, then exclusive", hold.Exclusive, hold.Exclusive, false},
		{"exclusive, then shared", hold.Exclusive, hold.Shared, false},
		{"shared, then exclusive", hold.Shared, hold.Exclusive, false},
		{"shared, then shared", hold.Shared, hold.Shared, true},
	} {
		mustAcquire(t, p, c.name, c.held)
		_, err := p.try(t.Context(), c.name, c.asked)
		if busy, isBusy := errors.AsType[*hold.Busy](err); c.granted != (err == nil) || !c.granted && (!isBusy || !busy.Here || busy.Holder == "") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}
