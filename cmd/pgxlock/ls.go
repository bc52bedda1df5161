package main

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/internal/place"
)

//go:embed sql/*.sql
var sqlFiles embed.FS

// statement returns the statement in sql/name.sql, with our objects qualified by
// the schema. The marker is a comment, so that psql runs the files as they are.
func statement(name, schema string) string {
	text, err := sqlFiles.ReadFile("sql/" + name + ".sql")
	if err != nil {
		panic("pgxlock: " + err.Error()) // a name that this program misspelt
	}
	return strings.ReplaceAll(string(text), "/* schema */", pgx.Identifier{schema}.Sanitize()+".")
}

func newLs() *cobra.Command {
	var t target
	var output format
	var prefix string
	var expired bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the leases",
		Long: `List the leases: who holds what, since when, and for how much longer if it is not
renewed. An expired lease may be taken by anybody; one that expired more than an
hour ago counts as abandoned.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			pool, err := t.connect(cmd.Context(), reading)
			if err != nil {
				return err
			}
			defer pool.Close()
			leases, err := listLeases(cmd.Context(), pool, t.schema, prefix, expired)
			if err != nil {
				return err
			}
			if output == formatJSON {
				return printJSON(cmd.OutOrStdout(), leases)
			}
			return printLeases(cmd.OutOrStdout(), colors(cmd), "", leases)
		},
	}
	t.addFlags(cmd.Flags())
	output.addFlag(cmd)
	cmd.Flags().StringVar(&prefix, "prefix", "", "only names that begin with this `text`")
	cmd.Flags().BoolVar(&expired, "expired", false, "only those that are no longer live")
	return cmd
}

// lease is a row of the view lock_leases.
type lease struct {
	Name             string          `json:"name"`
	State            string          `json:"state"`
	Holder           string          `json:"holder"`
	Token            int64           `json:"token"`
	AcquiredAt       time.Time       `json:"acquired_at"`
	ExpiresAt        time.Time       `json:"expires_at"`
	HeldSeconds      float64         `json:"held_seconds"`
	RemainingSeconds float64         `json:"remaining_seconds"`
	Metadata         json.RawMessage `json:"metadata"`
}

// The states of a lease; any other means that it is abandoned.
const (
	stateLive    = "live"
	stateExpired = "expired"
)

// listLeases asks for the leases in the schema, or where pgxlock is found.
func listLeases(ctx context.Context, pool *pgxpool.Pool, schema, prefix string, expired bool) ([]lease, error) {
	if schema == "" {
		var err error
		if schema, err = findSchema(ctx, pool); err != nil {
			return nil, err
		}
	}
	rows, _ := pool.Query(ctx, statement("leases", schema), prefix, expired) // CollectRows returns the error
	leases, err := pgx.CollectRows(rows, pgx.RowToStructByPos[lease])
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if ok && (pgErr.Code == pgerrcode.UndefinedTable || pgErr.Code == pgerrcode.InvalidSchemaName) {
		return nil, fmt.Errorf("schema %q has no pgxlock; name another one with --schema, or run pgxlock migrate up --schema %s", schema, shellQuote(schema))
	}
	return leases, err
}

// findSchema looks for pgxlock as a Locker does.
func findSchema(ctx context.Context, pool *pgxpool.Pool) (string, error) {
	found, err := place.Look(ctx, pool.QueryRow)
	if err != nil {
		return "", err
	}
	schema, err := found.Choose()
	if err != nil {
		return "", fmt.Errorf("%w; --schema names a schema, pgxlock migrate up installs", err)
	}
	return schema, nil
}

// maxMetadata is how much of the metadata a table shows.
const maxMetadata = 40

func printLeases(w io.Writer, p palette, indent string, leases []lease) error {
	rows := make([][]cell, len(leases))
	for i, l := range leases {
		color := red
		switch l.State {
		case stateLive:
			color = green
		case stateExpired:
			color = yellow
		}
		rows[i] = []cell{
			{text: printable(l.Name)},
			{l.State, color},
			{text: printable(l.Holder)},
			{text: fmt.Sprint(l.Token)},
			{text: brief(seconds(l.HeldSeconds))},
			{text: brief(seconds(l.RemainingSeconds))},
			{short(metadataText(l.Metadata), maxMetadata), faint},
		}
	}
	return printTable(w, p, indent, []string{"NAME", "STATE", "HOLDER", "TOKEN", "HELD FOR", "REMAINING", "METADATA"}, rows)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// metadataText shows a JSON string as its text, anything else as JSON, and the
// default as nothing.
func metadataText(metadata json.RawMessage) string {
	var text string
	if json.Unmarshal(metadata, &text) != nil {
		text = string(metadata)
	}
	if text == "{}" {
		return ""
	}
	return printable(text)
}
