package main

import (
	"context"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
)

// completeHeld completes keys and holder ids, of all commands below root that take some, by the locks that are held.
func completeHeld(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		completeHeld(cmd)
		if cmd.Flags().Lookup("database-url") == nil {
			continue
		}
		if cmd.Name() == "forget" {
			cmd.ValidArgsFunction = completeRuns
		} else if strings.Contains(cmd.Use, " KEY") && cmd.Name() != "once" { // the key of a run that is none yet
			further := cmd.ValidArgsFunction // for what comes after the key
			if further == nil {
				further = cobra.NoFileCompletions
			}
			cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
				if len(args) > 0 {
					return further(cmd, args, begin)
				}
				return heldAs(cmd, "", begin, keyOf)
			}
		}
		for flag, of := range map[string]func(pgxlock.Holder) (string, string){"key": keyOf, "prefix": keyOf, "holder": holderOf, "pid": processOf} {
			if cmd.Flags().Lookup(flag) != nil {
				_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
					key := ""
					if len(args) > 0 {
						key = args[0]
					}
					return heldAs(cmd, key, begin, of)
				}) // fails only if the flag is not there
			}
		}
	}
}

// plainUsages takes out of what flags say of themselves the backquotes that mark the name of a value, which completion
// would show.
func plainUsages(cmd *cobra.Command) {
	for _, below := range cmd.Commands() {
		plainUsages(below)
	}
	for _, flags := range []*pflag.FlagSet{cmd.Flags(), cmd.PersistentFlags()} {
		flags.VisitAll(func(flag *pflag.Flag) { _, flag.Usage = pflag.UnquoteUsage(flag) })
	}
}

func keyOf(h pgxlock.Holder) (string, string)    { return h.Key, h.ID }
func holderOf(h pgxlock.Holder) (string, string) { return h.ID, h.Key }

func processOf(h pgxlock.Holder) (string, string) {
	if h.PID == 0 {
		return "", "" // of a lease
	}
	return strconv.Itoa(int(h.PID)), h.ID
}

// plain is what any shell takes as it is, wherever it stands: of several that begin alike, bash inserts the beginning without
// quotes, and at the next tab runs what it finds there, while a key may have any text.
var plain = regexp.MustCompile(`^[\pL\pN_@#/.:+][\pL\pN_@#/.:+,-]*$`)

// completions are what begins as a word does, each once. If the database does not answer soon there are none.
type completions struct {
	begin string
	seen  map[string]bool
	list  []string
}

func completing(cmd *cobra.Command, begin string, ask func(ctx context.Context, pool *pgxpool.Pool, schema string, found *completions) error) []string {
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	t := targetOf(cmd)
	pool, err := t.connect(ctx, reading)
	if err != nil {
		return nil
	}
	defer pool.Close()
	found := completions{begin: begin, seen: make(map[string]bool)}
	if err := ask(ctx, pool, t.schema, &found); err != nil {
		return nil
	}
	return found.list
}

func (c *completions) add(what, description string) {
	if strings.HasPrefix(what, c.begin) && plain.MatchString(what) && !c.seen[what] {
		c.seen[what], c.list = true, append(c.list, cobra.CompletionWithDesc(what, printable(description)))
	}
}

// completeRuns completes the keys of the runs that are recorded, the latest ones first.
func completeRuns(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
	const directive, most = cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder, 1000
	if len(args) > 0 {
		return nil, directive
	}
	return completing(cmd, begin, func(ctx context.Context, pool *pgxpool.Pool, schema string, found *completions) error {
		runs, err := once.List(ctx, pool, &once.ListConfig{Limit: most, Schema: schema})
		for _, r := range runs {
			found.add(r.Key, string(r.State))
		}
		return err
	}), directive
}

// heldAs returns what holders of a key, "" for any, have that begins so, with a description.
func heldAs(cmd *cobra.Command, key, begin string, of func(pgxlock.Holder) (what, description string)) ([]string, cobra.ShellCompDirective) {
	return completing(cmd, begin, func(ctx context.Context, pool *pgxpool.Pool, schema string, found *completions) error {
		locks, err := monitor.New(pool, &monitor.Config{Schema: schema})
		if err != nil {
			return err
		}
		shot, err := locks.Snapshot(ctx)
		held := slices.Concat(shot.Holders, shot.Expired)
		if slices.Contains([]string{"evict", "step-down"}, cmd.Name()) { // which need a holder
			held = shot.Holders
		}
		for _, h := range held {
			if key == "" || h.Key == key {
				found.add(of(h))
			}
		}
		return err
	}), cobra.ShellCompDirectiveNoFileComp
}
