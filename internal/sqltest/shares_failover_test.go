package sqltest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A release and the grants behind it are lost with the failover: the lease is there again, and is
// joined, or acquired once more by its holder.
func TestAcquisitionOfALiveLeaseAfterAFailoverHasAGreaterToken(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, call := range map[string][]string{
		"a group": {
			"(try_acquire_shared_lock('k', 'A', '1 hour')).fencing_token", "release_shared_lock('k', 'A')", "(try_acquire_shared_lock('k', 'C')).fencing_token",
			"assert_shared_lock_held('k', 'C', TOKEN) = TOKEN", "pgxlock_renew_shares_batch('{k}', '{C}', '{TOKEN}', '{60000}') = 'renewed'",
			"(try_acquire_shared_lock('k', 'A')).acquired", "pgxlock_release_share('k', 'C', TOKEN, false) = 'left'",
		},
		"its own lease": {
			"(try_acquire_lock('k', 'A', '1 hour')).fencing_token", "release_lock('k', 'A')", "(try_acquire_lock('k', 'A')).fencing_token",
			"assert_lock_held('k', 'A', TOKEN) = TOKEN", "release_lock_fenced('k', 'A', TOKEN)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			primary, d := private(t, nil)
			standby := pgtest.Standby(t, primary, pgserver.Config{})
			first := d.get(call[0])
			await(t, open(t, standby.URL("postgres")), fmt.Sprintf("exists (select from distributed_locks where fencing_token = %s)", first))
			if err := standby.Detach(t.Context()); err != nil {
				t.Fatal(err)
			}
			d.want(call[1], "true")
			writer := d.get("(try_acquire_lock('k', 'B')).fencing_token")
			if err := primary.Kill(); err != nil {
				t.Fatal(err)
			}
			if err := standby.Promote(t.Context()); err != nil {
				t.Fatal(err)
			}
			d = open(t, standby.URL("postgres"))
			token := d.get(call[2])
			d.want(fmt.Sprintf("%s > %s", token, writer), "true")
			for _, works := range call[3:] {
				d.want(strings.ReplaceAll(works, "TOKEN", token), "true")
			}
		})
	}
}
