package monitor_test

import (
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

func TestRenewalsKnowALateLeaseFromOneWhoseTTLBecameShorter(t *testing.T) {
	t.Parallel()
	began := time.Now()
	var known *monitor.Renewals
	late := func(at, expires time.Duration) bool {
		shot := monitor.Snapshot{At: began.Add(at), Holders: []pgxlock.Holder{{Kind: pgxlock.KindLease, Key: "k", ID: "me", State: pgxlock.StateLive, Expires: began.Add(expires)}}}
		known = known.With(&shot)
		return shot.Holders[0].Late
	}
	for _, step := range []struct {
		at, expires time.Duration // minutes
		late        bool
	}{
		{0, 60, false}, {20, 80, false}, {51, 80, true}, // not renewed since
		{52, 112, false}, {53, 63, false}, {57, 67, false}, // 10 minutes from then on
		{63, 67, true},
	} {
		if late(step.at*time.Minute, step.expires*time.Minute) != step.late {
			t.Errorf("at minute %d, with the end in minute %d, it is late: %t", step.at, step.expires, !step.late)
		}
	}
}
