package advisory

import (
	"errors"
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestReleaseOfALockThatTheSessionDoesNotHaveReturnsTheLoss(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	lock := mustAcquire(t, p, "k", hold.Exclusive)
	c := &call{query: &query{text: fmt.Sprintf("select pg_advisory_unlock(%d)", numberOf("k"))}, alone: true}
	if !p.mux.await(c, p.mux.submit(t.Context(), c)) || c.err != nil {
		t.Fatal(c.err)
	}
	if err := lock.release(); !errors.Is(err, lockerr.ErrLost) {
		t.Errorf("%v, want ErrLost", err)
	}
	if err := mustAcquire(t, p, "k", hold.Exclusive).release(); err != nil {
		t.Errorf("the next: %v", err)
	}
}
