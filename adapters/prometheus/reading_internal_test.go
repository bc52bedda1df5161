package pgxlockprom

import (
	"errors"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

// A snapshot takes so many leases and tickets. What it took is shown where there are more, and
// nothing where nothing could be read: 0 would look like a count.
func TestPartThatCouldNotBeReadIsLeftOut(t *testing.T) {
	t.Parallel()
	var partly monitor.Snapshot
	partly.Unread = monitor.Unread{Leases: errors.New("too many"), Queues: errors.New("too many")}
	unread := partly
	partly.Holders = []pgxlock.Holder{{Kind: pgxlock.KindLease}}
	partly.Waiters = []monitor.Waiter{{Kind: pgxlock.KindLease}}
	for name, test := range map[string]struct {
		shot monitor.Snapshot
		want map[*prometheus.Desc]int
	}{
		"everything read":  {monitor.Snapshot{}, map[*prometheus.Desc]int{holders: 4, oldestHold: 1, waiters: 2}},
		"a part left out":  {partly, map[*prometheus.Desc]int{holders: 4, oldestHold: 1, waiters: 2}},
		"nothing of it":    {unread, map[*prometheus.Desc]int{holders: 2}},
		"no advisory lock": {monitor.Snapshot{Unread: monitor.Unread{Advisory: errors.New("a standby")}}, map[*prometheus.Desc]int{holders: 2, oldestHold: 1, waiters: 1}},
	} {
		told := make(map[*prometheus.Desc]int)
		tell := func(d *prometheus.Desc, _ float64, _ ...string) { told[d]++ }
		s := &state{shot: test.shot}
		s.emitHolders(tell)
		s.tellWaiters(tell)
		for _, d := range []*prometheus.Desc{holders, oldestHold, waiters} {
			if told[d] != test.want[d] {
				t.Errorf("%s: %d of %v, want %d", name, told[d], d, test.want[d])
			}
		}
	}
}
