package waitqueue

import (
	"testing"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

func TestWaiterThatLeavesWithASignalPassesItOn(t *testing.T) {
	t.Parallel()
	var q Queue
	name := lockkey.Name{Key: "k"}
	first, second := q.join(name, &hold.Busy{}, nil, hold.Exclusive), q.join(name, nil, nil, hold.Exclusive)
	q.Freed(name)
	if len(first.woken) != 1 || len(second.woken) != 0 {
		t.Fatalf("%d signals for the first, %d for the second", len(first.woken), len(second.woken))
	}
	first.leave()
	if len(second.woken) != 1 {
		t.Error("the second one was not told")
	}
	second.leave()
	if q.Waiting(name) {
		t.Error("the local queue is left")
	}
}

func TestALockIsHereFromItsGrantUntilItIsFreed(t *testing.T) {
	t.Parallel()
	var q Queue
	name := lockkey.Name{Key: "k"}
	first, second := q.join(name, &hold.Busy{}, nil, hold.Exclusive), q.join(name, nil, nil, hold.Exclusive)
	isHere := func() bool {
		_, here, _, _ := second.look()
		return here
	}
	first.granted(0, true)
	if !isHere() || len(second.woken) != 0 {
		t.Errorf("granted to the first: here %t, and %d signals for the second", isHere(), len(second.woken))
	}
	q.Freed(name)
	if isHere() || len(second.woken) != 1 {
		t.Errorf("freed: here %t, and %d signals for the second", isHere(), len(second.woken))
	}
	second.granted(0, false)
}
