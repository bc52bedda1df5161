package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/serve"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/sql"
)

// The command runs lists the runs that are recorded, and forgets one.

func newRuns() *cobra.Command {
	var t target
	var output format
	var key string
	var states []string
	var limit int
	cmd := &cobra.Command{
		Use:   "runs",
		Short: "List the runs of once, and forget one",
		Long: `List the recorded runs of pgxlock once, package once and start_run(), the latest periods
first. RUN is the beginning of the period, or the tick of a schedule.

STATE is running, succeeded, failed, abandoned (its process has died, and the next call
in the period starts it again) or skipped (pgxlock once --first next). A run that is not
retried stays running when its process has died: it holds no lease by which to tell. It is
not started again, and neither is a failed one, unless you run pgxlock runs forget.`,
		Example: `  pgxlock runs --key nightly
  pgxlock runs --state failed,abandoned -o json | jq -r '.[].error'`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return noCommand(cmd, args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseEmpty(cmd.Flags(), "all", "key", "state"); err != nil {
				return err
			}
			if limit <= 0 || limit > maxRuns {
				return usageError{fmt.Errorf("--limit is %d, it must be between 1 and %d", limit, maxRuns)}
			}
			for _, state := range states {
				if !slices.Contains(runStates, state) {
					return usageError{fmt.Errorf("--state %q: use %s", state, strings.Join(runStates, ", "))}
				}
			}
			return t.inDatabase(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
				most := limit
				if len(states) > 0 {
					most = maxRuns // the limit is for those that pass
				}
				list, err := once.List(ctx, pool, &once.ListConfig{Key: key, Limit: most, Schema: schema})
				if err != nil {
					return err
				}
				if len(states) > 0 {
					list = slices.DeleteFunc(list, func(r once.Record) bool { return !slices.Contains(states, string(r.State)) })
					list = list[:min(limit, len(list))]
				}
				if output == formatJSON {
					return printJSON(cmd.OutOrStdout(), views(list, viewRun))
				}
				return printRuns(cmd.OutOrStdout(), colors(cmd), sheetOf(cmd), list)
			})
		},
	}
	t.addFlags(cmd)
	output.addFlag(cmd)
	addWideFlag(cmd)
	flags := cmd.Flags()
	flags.StringVar(&key, "key", "", "only the runs of this `key`")
	flags.StringSliceVar(&states, "state", nil, "only these `states`: "+strings.Join(runStates, ", "))
	flags.IntVar(&limit, "limit", 100, "at most this `number` of runs, the latest")
	complete(cmd, "state", runStates)
	cmd.AddCommand(newRunsForget())
	return cmd
}

// maxRuns is how many runs the server lists at most.
const maxRuns = 10000

var runStates = []string{
	string(once.StateRunning), string(once.StateSucceeded), string(once.StateFailed), string(once.StateAbandoned), string(once.StateSkipped),
}

func newRunsForget() *cobra.Command {
	var t target
	var output format
	var slot string
	var force bool
	cmd := &cobra.Command{
		Use:   "forget KEY [flags]",
		Short: "Let a run be started again",
		Long: `Remove the record of a run, so that the next call in its period starts it again: the
latest run of the key, or that of --run, as pgxlock runs shows it.

A run that has not ended is forgotten only with --force: if its process lives, the work
is then done twice at once.`,
		Example: `  pgxlock runs forget nightly
  pgxlock runs forget nightly --run 2026-03-29T00:00:00Z`,
		Args: oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			var at time.Time
			if cmd.Flags().Changed("run") {
				var err error
				if at, err = time.Parse(time.RFC3339Nano, slot); err != nil {
					return usageError{fmt.Errorf("--run %q is no time; use one that pgxlock runs shows, such as 2026-03-29T00:00:00Z", slot)}
				}
			}
			among := 1 // the latest
			if !at.IsZero() {
				among = maxRuns
			}
			return t.inDatabase(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
				list, err := once.List(ctx, pool, &once.ListConfig{Key: args[0], Limit: among, Schema: schema})
				if err != nil {
					return err
				}
				if !at.IsZero() {
					list = slices.DeleteFunc(list, func(r once.Record) bool { return !r.Slot.Equal(at) })
				}
				var forgotten []once.Record
				if len(list) > 0 {
					run := list[0]
					if run.State == once.StateRunning && !force {
						return outcome{exitBusy, fmt.Errorf("the run of %s has not ended: if its process has died, add --force", slotOf(run))}
					}
					var found bool
					if err := write(ctx, pool, statement("forget_run", schema), []any{run.Key, run.Slot}, &found); err != nil {
						return err
					}
					if found {
						forgotten = append(forgotten, run)
					}
				}
				if output == formatJSON {
					err = printJSON(cmd.OutOrStdout(), views(forgotten, viewRun))
				}
				switch {
				case err != nil:
					return err
				case len(forgotten) == 0:
					return outcome{exitNoRun, fmt.Errorf("no such run of %s is recorded", shown(args[0]))}
				case output == formatJSON:
					return nil
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "forgot the run of %s (%s)\n", slotOf(forgotten[0]), forgotten[0].State)
				return err
			})
		},
	}
	t.addFlags(cmd)
	output.addFlag(cmd)
	cmd.Flags().StringVar(&slot, "run", "", "the run of this `time`, the beginning of its period (default: the latest)")
	cmd.Flags().BoolVar(&force, "force", false, "also a run that has not ended")
	return cmd
}

// stoppedRuns returns the runs that the doctor warns of.
func stoppedRuns(ctx context.Context, pool *pgxpool.Pool, named string) ([]serve.Run, error) {
	return rowsOf(ctx, pool, named, statements.DoctorRuns.In, nil, pgx.RowToStructByPos[serve.Run])
}

// slotOf writes which run of its key it is, as --run reads it.
func slotOf(r once.Record) string { return r.Slot.Local().Format(time.RFC3339Nano) }

// runView is a run as JSON shows it.
type runView struct {
	Key           string    `json:"key"`
	Slot          time.Time `json:"slot"`
	State         string    `json:"state"`
	Attempts      int       `json:"attempts"`
	Holder        string    `json:"holder"`
	Retry         bool      `json:"retry"`
	Started       time.Time `json:"started_at,omitzero"`
	Finished      time.Time `json:"finished_at,omitzero"`
	Error         string    `json:"error,omitempty"`
	PeriodSeconds float64   `json:"period_seconds,omitempty"` // of a tick there is none
	OffsetSeconds float64   `json:"offset_seconds,omitempty"`
	Zone          string    `json:"zone,omitempty"`
}

func viewRun(r once.Record) runView {
	return runView{
		r.Key, r.Slot, string(r.State), r.Attempts, r.Holder, r.Retry, r.Started, r.Finished, r.Error,
		r.Schedule.Period.Seconds(), r.Schedule.Offset.Seconds(), r.Schedule.Location,
	}
}

var runTable = table{
	titles:  []string{"KEY", "RUN", "EVERY", "STATE", "STARTED AT", "FINISHED AT", "ATTEMPTS", "BY", "ERROR"},
	holders: []string{"BY"},
	keys:    []string{"KEY", "RUN"},
	prose:   "ERROR",
	extra:   []string{"EVERY", "ERROR", "ATTEMPTS", "STARTED AT", "BY", "FINISHED AT"},
}

func printRuns(w io.Writer, p palette, s sheet, list []once.Record) error {
	rows := make([][]cell, len(list))
	for i, r := range list {
		every := ""
		if r.Schedule.Period > 0 {
			every = inDays(r.Schedule.Period)
		}
		color := map[once.State]string{once.StateRunning: green, once.StateFailed: red, once.StateAbandoned: red}[r.State]
		rows[i] = []cell{
			{text: printable(r.Key)},
			{text: slotOf(r)},
			{text: every},
			{text: string(r.State), color: color},
			{text: timestamp(r.Started)},
			{text: timestamp(r.Finished)},
			{text: strconv.Itoa(r.Attempts)},
			{text: printable(r.Holder)},
			{text: printable(r.Error)},
		}
	}
	return runTable.print(w, p, s, rows)
}
