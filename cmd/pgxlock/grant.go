package main

import (
	"context"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// withGrant makes of the advice to grant rights, if a text has it, the statements that give this role those that the command
// takes.
func withGrant(cmd *cobra.Command, text string) string {
	if !strings.Contains(text, lockerr.Grant) {
		return text
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), answerTime)
	defer cancel()
	mend, err := grant(ctx, targetOf(cmd), kindOfRole(cmd))
	if err != nil || mend == "" {
		return text
	}
	return strings.ReplaceAll(text, lockerr.Grant, printable(mend))
}

// granting is [withGrant] for what is shown again and again: it asks the database once for each text that
// it replaced.
func granting(cmd *cobra.Command) func(string) string {
	var known sync.Map
	return func(text string) string {
		if with, ok := known.Load(text); ok {
			return with.(string)
		}
		with := withGrant(cmd, text)
		if with != text {
			known.Store(text, with)
		}
		return with
	}
}

// answerTime bounds questions to the database beside those of the command.
const answerTime = 3 * time.Second

// targetOf is the target of the flags of a command, to ask something else there.
func targetOf(cmd *cobra.Command) *target {
	t := &target{flags: cmd.Flags(), stderr: func() io.Writer { return io.Discard }}
	t.url, _ = t.flags.GetString("database-url")
	t.schema, _ = t.flags.GetString("schema")
	return t
}

// kindOfRole is the kind of role, as grant_locks() calls it, that a command is for.
func kindOfRole(cmd *cobra.Command) string {
	if cmd.Name() == "forget" { // a run
		return "administration"
	}
	for cmd.GroupID == "" && cmd.HasParent() {
		cmd = cmd.Parent()
	}
	return map[string]string{groupLock: "application", groupInspect: "monitoring", groupOperate: "administration"}[cmd.GroupID]
}

// grant returns the statements that give the role of a connection the rights of a kind of role that it lacks.
func grant(ctx context.Context, t *target, kind string) (mend string, err error) {
	pool, err := t.connect(ctx, reading)
	if err != nil {
		return "", err
	}
	defer pool.Close()
	err = pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error {
		q := dbconn.Querier{Conn: c.Conn()}
		found, err := q.Look(ctx, t.schema)
		if err != nil {
			return err
		}
		schema, err := found.Choose(t.schema)
		if err != nil {
			return err
		}
		type needs struct {
			Kind, Lacks, Mend string
			Granted           bool
			Owner             string
		}
		kinds, err := pgx.CollectRows(q.Query(ctx, statements.DoctorRights.Text(), schema.Name), pgx.RowToStructByPos[needs])
		for _, k := range kinds {
			if k.Kind == kind {
				mend = k.Mend
			}
		}
		return err
	})
	return mend, err
}
