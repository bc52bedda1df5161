package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

func newDoctor() *cobra.Command {
	var t target
	var output format
	var strict bool
	var cfg doctor.Config
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check that this database is safe for locks",
		Long: `Check that this database is safe for locks: the server, a pooler in front of it, the
settings of this role, and what the migrations made. doctor changes nothing. Use the
connection string of the program that locks: the result depends on the role.

doctor exits with 1 if it finds an error, with --strict also if it finds a warning. It
skips what takes rights that a role which only locks need not have.
What each check means is in
` + lockerr.ManualDoctor + "#checks.",
		Example: `  pgxlock doctor
  pgxlock doctor --strict -o json                  # in a pipeline`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.LongTransaction <= 0 {
				return usageError{fmt.Errorf("--long-transaction is %s, it must be more than 0", cfg.LongTransaction)}
			}
			t.warning.Do(func() {})                        // of a superuser: it is a finding
			pool, err := t.connect(cmd.Context(), reading) // so is a standby
			if err != nil {
				return err
			}
			defer pool.Close()
			cfg.Schema = t.schema
			findings, failed := doctor.Check(cmd.Context(), pool, &cfg)
			if failed != nil && len(findings) == 0 {
				return failed
			}
			for i, f := range findings {
				findings[i].Advice = inFlags(cmd.Flags(), advices, f.Advice)
			}
			if err := printFindings(cmd, output, findings); err != nil {
				return err
			}
			if failed != nil {
				return failed
			}
			if slices.ContainsFunc(findings, func(f doctor.Finding) bool {
				return f.Status == doctor.StatusError || strict && f.Status == doctor.StatusWarning
			}) {
				return errUnsound
			}
			return nil
		},
	}
	t.addFlags(cmd)
	output.addFlag(cmd)
	cmd.Flags().BoolVar(&strict, "strict", false, "exit with 1 on a warning too")
	durationVar(cmd.Flags(), &cfg.LongTransaction, "long-transaction", "", time.Hour, "the `age` from which an open transaction is a finding")
	return cmd
}

func printFindings(cmd *cobra.Command, output format, findings []doctor.Finding) error {
	if output == formatJSON {
		return printJSON(cmd.OutOrStdout(), findings)
	}
	p := colors(cmd)
	count := make(map[doctor.Status]int)
	for _, f := range findings {
		if _, err := io.WriteString(cmd.OutOrStdout(), finding(p, columns(cmd.OutOrStdout()), f)); err != nil {
			return err
		}
		count[f.Status]++
	}
	_, err := fmt.Fprintln(cmd.OutOrStdout(), summary(count))
	return err
}

// summary returns how many findings have each status, as "16 ok, 3 skipped, 1 warning, 2 errors".
func summary(count map[doctor.Status]int) string {
	text := fmt.Sprintf("%d ok", count[doctor.StatusOK])
	if n := count[doctor.StatusSkipped]; n > 0 {
		text += fmt.Sprintf(", %d skipped", n)
	}
	for _, status := range []doctor.Status{doctor.StatusWarning, doctor.StatusError} {
		switch n := count[status]; n {
		case 0:
		case 1:
			text += fmt.Sprintf(", 1 %s", status)
		default:
			text += fmt.Sprintf(", %d %ss", n, status)
		}
	}
	return text
}

// finding is what was found in a line, and what to do in another.
func finding(p palette, columns int, f doctor.Finding) string {
	const indent = 21
	color := map[doctor.Status]string{doctor.StatusOK: green, doctor.StatusWarning: yellow, doctor.StatusError: red}[f.Status]
	begin := p.paint(color, fmt.Sprintf("%-7s", f.Status)) + " " + p.paint(bold, fmt.Sprintf("%-12s", f.Check)) + " "
	text := hang(begin, printable(f.Detail), indent, columns)
	if f.Advice != "" {
		text += hang(strings.Repeat(" ", indent)+p.paint(faint, "->")+" ", p.paint(faint, printable(f.Advice)), indent+3, columns)
	}
	return text
}
