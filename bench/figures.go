package main

import (
	"context"
	"strings"
)

// A figure compares a way of pgxlock's with a peer's, which share what they work
// on. Where there are many peers, it is a [table].
type figure struct {
	name    string // system/peer
	about   string // what is compared, and the goal if there is one
	workers []int  // a row for each number

	// prepare makes both ways ready on an empty stage. Each returns an error
	// unless it did what it is measured for.
	prepare func(context.Context, *stage) (system, peer op, err error)

	gauge *gauge // read around one more slice of each, if not nil
}

// figures are all comparisons of two ways, in the order in which they are shown.
var figures = []figure{
	{
		name:    "locktx/floor",
		about:   "LockTx against SELECT pg_advisory_xact_lock($1), the calls in an open transaction",
		workers: []int{1, 8}, prepare: lockTx,
	},
	{
		name:    "locktx-maxwait/floor",
		about:   "the same with MaxWait, which nobody has to wait for",
		workers: []int{1, 8}, prepare: lockTxMaxWait,
	},
	{
		name:    "fence/floor",
		about:   "a transaction that fences its own lease and inserts a row, against FOR KEY SHARE on the lease in place of the fence",
		workers: []int{1, 8}, prepare: fencedTx,
	},
	{
		name:    "fence-call/floor",
		about:   "the fence alone, without the transaction around it, against FOR KEY SHARE",
		workers: []int{1, 8}, prepare: fenceCall,
	},
	{
		name:    "fence-shared/floor",
		about:   "as fence, all workers under one lease; goal: 0 MultiXact members",
		workers: []int{64}, prepare: fencedTxShared, gauge: multiXactMembers,
	},
	{
		name:    "fence-call-shared/floor",
		about:   "as fence-call, all workers under one lease",
		workers: []int{64}, prepare: fenceCallShared,
	},
	{
		name:    "claim/floor",
		about:   "a transaction with ClaimTx of a new key, against INSERT ... ON CONFLICT DO NOTHING in place of it",
		workers: []int{1, 8}, prepare: claimNew,
	},
	{
		name:    "claim-taken/floor",
		about:   "as claim, with a key that was claimed before",
		workers: []int{1, 8}, prepare: claimTaken,
	},
	{
		name:    "advisory-tcp/floor-tcp",
		about:   "TryAcquire and Release of an advisory lock against SELECT 1 twice, through TCP and a password",
		workers: []int{1}, prepare: advisoryOverTCP,
	},
	{
		name:    "lease/floor",
		about:   "TryAcquire and Release against two durable upserts of one row",
		workers: []int{1, 32, 256}, prepare: leaseAndUpserts,
	},
	{
		name:    "lease/seed",
		about:   "TryAcquire and Release against acquire_lock and release_lock of testdata/seed.sql",
		workers: []int{1, 32, 256}, prepare: leaseAndSeed,
	},
	{
		name:    "lease-1M/lease-1k",
		about:   "TryAcquire and Release beside 1,000,000 other leases, against the same beside 1,000",
		workers: []int{1, 32}, prepare: leaseInCrowd,
	},
}

// rows returns one for each number of workers.
func (f figure) rows() []row {
	system, peer, _ := strings.Cut(f.name, "/")
	var rows []row
	for _, workers := range f.workers {
		rows = append(rows, row{
			title: f.name, about: f.about, workers: workers, gauge: f.gauge,
			ratios: []ratio{{system, peer}},
			prepare: func(ctx context.Context, s *stage, _ []string) ([]way, error) {
				ours, theirs, err := f.prepare(ctx, s)
				return []way{s.way(system, ours), s.way(peer, theirs)}, err
			},
		})
	}
	return rows
}
