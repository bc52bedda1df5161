package waitqueue

import (
	"encoding/json"
	"strings"
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

func TestLockIsHereFromItsGrantUntilItIsFreed(t *testing.T) {
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

func TestTicketSaysOfNoMoreHoldsThanThereIsRoomFor(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("é<", 120)
	for id, most := range map[string]int{"A": 1000, "advisory:1:1:": 1000, long: 60} {
		var q Queue
		var holds []heldLock
		for range 600 {
			holds = append(holds, heldLock{id: id})
		}
		name := lockkey.Name{Key: "k"}
		q.join(name, &hold.Busy{}, holds, hold.Exclusive)
		last := q.join(name, &hold.Busy{}, holds, hold.Exclusive)
		text := last.local.holdsLocked()
		var said []string
		if err := json.Unmarshal([]byte(*text), &said); err != nil || len(*text) > 65536 || len(said) < most || len(said) > 1000 {
			t.Errorf("%.20s: %d of 1200 holds in %d bytes: %v", id, len(said), len(*text), err)
		}
		for _, s := range said {
			if s != id {
				t.Errorf("%q is no hold", s)
			}
		}
	}
	var q Queue
	if text := q.join(lockkey.Name{Key: "k"}, &hold.Busy{}, nil, hold.Exclusive).local.holdsLocked(); text != nil {
		t.Errorf("without holds: %s", *text)
	}
}
