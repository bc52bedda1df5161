package advisory

import (
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestNamesOfLocksThatAreHeldForLongArePublishedOnce(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	lock := mustAcquire(t, p, "old", hold.Exclusive)
	young := mustAcquire(t, p, "young", hold.Exclusive)
	young.Since = time.Now().Add(time.Hour)
	lock.Since = time.Now().Add(-nameAfter)
	if names := p.Unpublished(); len(names) != 1 || names[0] != "old" {
		t.Errorf("%q, want old alone", names)
	}
	if names := p.Unpublished(); len(names) != 0 {
		t.Errorf("%q are published again at once", names)
	}
}
