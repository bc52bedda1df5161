package main

import (
	"context"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

// completeHeld completes keys and holder ids, of all commands below root that take some, by the locks that are held.
func completeHeld(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		completeHeld(cmd)
		if cmd.Flags().Lookup("database-url") == nil {
			continue
		}
		if strings.Contains(cmd.Use, " KEY") && cmd.Name() != "forget" && cmd.Name() != "once" { // those of runs
			cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, begin string) ([]string, cobra.ShellCompDirective) {
				if len(args) > 0 {
					return nil, cobra.ShellCompDirectiveNoFileComp
				}
				return heldAs(cmd, "", begin, keyOf)
			}
		}
		for flag, of := range map[string]func(pgxlock.Holder) (string, string){"key": keyOf, "prefix": keyOf, "holder": holderOf} {
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
	for _, h := range slices.Concat(shot.Holders, shot.Expired) {
		what, description := of(h)
		if (key == "" || h.Key == key) && strings.HasPrefix(what, begin) && plain.MatchString(what) && !seen[what] {
			seen[what], list = true, append(list, cobra.CompletionWithDesc(what, printable(description)))
		}
	}
	return list, directive
}
