package main

import (
	"context"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

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

func keyOf(h pgxlock.Holder) (string, string)    { return h.Key, h.ID }
func holderOf(h pgxlock.Holder) (string, string) { return h.ID, h.Key }

// plain is what any shell takes as it is, wherever it stands: of several that begin alike, bash inserts the beginning without
// quotes, and at the next tab runs what it finds there, while a key may have any text.
var plain = regexp.MustCompile(`^[\pL\pN_@#/.:+][\pL\pN_@#/.:+,-]*$`)

func processOf(h pgxlock.Holder) (string, string) {
	if h.PID == 0 {
		return "", "" // of a lease
	}
	return strconv.Itoa(int(h.PID)), h.ID
}

// completeRuns completes the keys of the runs that are recorded, the latest ones first.
func completeRuns(cmd *cobra.Command, args []string, begin string) (list []string, _ cobra.ShellCompDirective) {
	const directive, most = cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder, 1000
	if len(args) > 0 {
		return nil, directive
	}
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	t := targetOf(cmd)
	pool, err := t.connect(ctx, reading)
	if err != nil {
		return nil, directive
	}
	defer pool.Close()
	runs, err := once.List(ctx, pool, &once.ListConfig{Limit: most, Schema: t.schema})
	if err != nil {
		return nil, directive
	}
	seen := make(map[string]bool)
	for _, r := range runs {
		if strings.HasPrefix(r.Key, begin) && plain.MatchString(r.Key) && !seen[r.Key] {
			seen[r.Key], list = true, append(list, cobra.CompletionWithDesc(r.Key, string(r.State)))
		}
	}
	return list, directive
}

// heldAs returns what holders of a key, "" for any, have that begins so, with a description; nothing if the database
// does not answer soon.
func heldAs(cmd *cobra.Command, key, begin string, of func(pgxlock.Holder) (what, description string)) (list []string, _ cobra.ShellCompDirective) {
	const directive = cobra.ShellCompDirectiveNoFileComp
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	t := targetOf(cmd)
	pool, err := t.connect(ctx, reading)
	if err != nil {
		return nil, directive
	}
	defer pool.Close()
	locks, err := monitor.New(pool, &monitor.Config{Schema: t.schema})
	if err != nil {
		return nil, directive
	}
	shot, err := locks.Snapshot(ctx)
	if err != nil {
		return nil, directive
	}
	seen := make(map[string]bool)
	held := slices.Concat(shot.Holders, shot.Expired)
	if slices.Contains([]string{"evict", "step-down"}, cmd.Name()) { // which need a holder
		held = shot.Holders
	}
	for _, h := range held {
		what, description := of(h)
		if (key == "" || h.Key == key) && strings.HasPrefix(what, begin) && plain.MatchString(what) && !seen[what] {
			seen[what], list = true, append(list, cobra.CompletionWithDesc(what, printable(description)))
		}
	}
	return list, directive
}
