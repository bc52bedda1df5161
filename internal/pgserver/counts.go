// What tests use up is counted: seconds differ from machine to machine, these numbers do not.

package pgserver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

// CountsEnv is the environment variable that names the file to which every process of a run of
// tests appends what it used. Nothing is counted where it is empty.
const CountsEnv = "PGXLOCK_TEST_COUNTS"

// Counts are what tests used, and what they had to leave out.
type Counts struct {
	Servers     int      `json:"servers,omitempty"`     // started
	Connections int      `json:"connections,omitempty"` // server processes that were started for a client
	Databases   int      `json:"databases,omitempty"`   // created
	Skipped     []string `json:"skipped,omitempty"`     // a line for each test that lacked something
}

// Add adds other counts.
func (c *Counts) Add(other Counts) {
	c.Servers += other.Servers
	c.Connections += other.Connections
	c.Databases += other.Databases
	c.Skipped = append(c.Skipped, other.Skipped...)
}

// String is a line for people.
func (c *Counts) String() string {
	return fmt.Sprintf("%d servers, %d connections, %d databases", c.Servers, c.Connections, c.Databases)
}

// Report appends the counts to the file that CountsEnv names. Processes may do so at the same
// time: a line this short is written at once.
func (c *Counts) Report() error {
	path := os.Getenv(CountsEnv)
	if path == "" {
		return nil
	}
	line, err := json.Marshal(c)
	if err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.Write(append(line, '\n'))
	return errors.Join(err, file.Close())
}

// ReadCounts adds up what was reported to the file.
func ReadCounts(path string) (all Counts, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return all, err
	}
	for line := range bytes.Lines(text) {
		var one Counts
		if err := json.Unmarshal(line, &one); err != nil {
			return all, fmt.Errorf("%s: %w in %q", path, err, line)
		}
		all.Add(one)
	}
	return all, nil
}
