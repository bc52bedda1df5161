package advisory

import (
	"testing"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestHoldersAreTheHoldsOfThisProcessAndTheSessionsOfOthers(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p := connected(t, db.Pool, Config{})
	first, second := mustAcquire(t, p, "k", hold.Shared), mustAcquire(t, p, "k", hold.Shared)
	other := connected(t, db.Pool, Config{})
	mustAcquire(t, other, "k", hold.Shared)
	holders, err := p.Holders(t.Context(), []string{"k", "free"})
	if err != nil {
		t.Fatal(err)
	}
	here := map[*hold.Hold]int{}
	there := 0
	for _, h := range holders {
		if h.Key != "k" || h.Mode != hold.Shared {
			t.Errorf("%+v", h)
		}
		switch h.PID {
		case p.pid:
			for _, lock := range []held{first, second} {
				if h.ID == lock.Holder && h.Since.Equal(lock.Since) && h.Expires.After(h.Since) {
					here[lock.Hold]++
				}
			}
		case other.pid:
			there++
		}
	}
	if len(holders) != 3 || here[first.Hold] != 1 || here[second.Hold] != 1 || there != 1 {
		t.Errorf("%+v", holders)
	}
}
