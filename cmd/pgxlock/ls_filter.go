package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// filter says which leases ls lists, and in which order. The server does both.
// The zero value is all of them, by key.
type filter struct {
	prefix        string
	holder        string
	states        []string
	expired       bool // both states that are not live
	olderThan     time.Duration
	expiresWithin time.Duration
	sort          string
	limit         int // 0: none
}

var (
	states = []string{stateLive, stateExpired, stateAbandoned}
	orders = []string{"key", "age", "expiry"}
)

func (f *filter) addFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.prefix, "prefix", "", "only keys that begin with this `text`")
	flags.StringVar(&f.holder, "holder", "", "only holder ids that contain this `text`, such as an owner or a host")
	flags.StringSliceVar(&f.states, "state", nil, "only these `states`: live, expired, abandoned")
	flags.BoolVar(&f.expired, "expired", false, "only leases that are no longer live: the same as --state expired,abandoned")
	durationVar(flags, &f.olderThan, "older-than", "", 0, "only leases acquired more than this `duration` ago")
	durationVar(flags, &f.expiresWithin, "expires-within", "", 0, "only live leases that expire within this `duration` unless they are renewed")
	flags.IntVar(&f.limit, "limit", 0, "at most this `number` of leases (default: all)")
	flags.StringVar(&f.sort, "sort", orders[0], "`order`: key, age (the oldest first) or expiry (the next first)")
	for name, values := range map[string][]string{"state": states, "sort": orders} {
		if err := cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic("pgxlock: " + err.Error()) // the flag was added above
		}
	}
}

// check says what is wrong with the flags.
func (f *filter) check(flags *pflag.FlagSet) error {
	if err := refuseEmpty(flags, "all", "prefix", "holder", "state"); err != nil {
		return err
	}
	if f.expired && flags.Changed("state") {
		return usageError{fmt.Errorf("--expired and --state exclude each other; leave one out")}
	}
	for _, state := range f.states {
		if !slices.Contains(states, state) {
			return usageError{fmt.Errorf("--state %q: use %s", state, strings.Join(states, ", "))}
		}
	}
	if !slices.Contains(orders, f.sort) {
		return usageError{fmt.Errorf("--sort %q: use %s", f.sort, strings.Join(orders, ", "))}
	}
	for name, value := range map[string]int64{"older-than": int64(f.olderThan), "expires-within": int64(f.expiresWithin), "limit": int64(f.limit)} {
		if flags.Changed(name) && value <= 0 {
			return usageError{fmt.Errorf("--%s is %s, it must be more than 0", name, flags.Lookup(name).Value)}
		}
	}
	return nil
}

// args are those of the statement leases, which yields one more than the limit if
// there are more.
func (f filter) args() []any {
	among := f.states
	if f.expired {
		among = []string{stateExpired, stateAbandoned}
	}
	given := func(d time.Duration) *float64 {
		if d == 0 {
			return nil
		}
		return new(d.Seconds())
	}
	var most *int
	if f.limit > 0 {
		most = new(min(f.limit, math.MaxInt-1) + 1) // to see whether there are more
	}
	return []any{f.prefix, f.holder, among, given(f.olderThan), given(f.expiresWithin), f.sort, most}
}
