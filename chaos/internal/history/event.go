// Package history writes and reads what happened in a run, as one JSON object per line.
//
// Each process of a run has a file of its own in the folder of the run. All processes run on one
// machine, so the times of their events are readings of one clock.
package history

import "time"

// An Event is a line of a history. The fields beside those of the first group depend on What.
type Event struct {
	Process string    `json:"process"` // unique in a run: a process that is started again has another name
	Seq     int64     `json:"seq"`     // numbers the events of a process, from 1 on
	Mono    int64     `json:"mono"`    // Now when the event was written: before a call that it begins, after a call that it ends
	Wall    time.Time `json:"wall"`
	What    What      `json:"what"`

	Caller int   `json:"caller,omitempty"` // which goroutine of the process
	Locker int   `json:"locker,omitempty"` // which Locker of the process, if it has several of a kind: callers of one are served in the order in which they came
	Op     int64 `json:"op,omitempty"`     // unique in a process: an Ask and all that follows from it have one

	// Of an Ask and all answers to it.
	Kind   Kind   `json:"kind,omitempty"`
	Key    string `json:"key,omitempty"` // for a permit, the semaphore's
	Shared bool   `json:"shared,omitempty"`
	Try    bool   `json:"try,omitempty"`    // the call does not wait for other holders
	Set    int64  `json:"set,omitempty"`    // of an Ask for a Set: the Asks for all keys of a call have one, which is unique in a process
	Period string `json:"period,omitempty"` // of a Once without Retry: which run it is, if that is known
	Permit int    `json:"permit,omitempty"` // of Granted: the number of the permit, 3 for jobs#3

	Limit int     `json:"limit,omitempty"` // of an Ask: the permits of the semaphore or the burst of the limit; of Connections: the most that the process may have
	Rate  float64 `json:"rate,omitempty"`  // of an Ask for a Limit: events in a second
	N     int     `json:"n,omitempty"`     // of an Ask for a Limit: how many events; of Connections and Left: how many were counted

	Holder   string        `json:"holder,omitempty"`   // of Granted, and of an Evict that is about its Key: the holder id
	Token    int64         `json:"token,omitempty"`    // of the lock; 0: it has none
	TTL      time.Duration `json:"ttl,omitempty"`      // of the lock; 0: it has none
	Deadline int64         `json:"deadline,omitempty"` // of Granted and Renewed: the local deadline on the clock of Now, or a time before it; 0: none. At converts
	Began    int64         `json:"began,omitempty"`    // of Held: Now before the call that found the lock held

	Write    int64 `json:"write,omitempty"`    // unique in a process: a WriteAsk and all that follows from it have one. Op is that of the lock
	Position int64 `json:"position,omitempty"` // of a Row: its number in the order in which the server inserted the rows

	Fault  Fault  `json:"fault,omitempty"`  // of FaultBegun and FaultEnded; Op pairs them
	Target string `json:"target,omitempty"` // of a fault: the process it concerns; empty: the server, or all

	Err string `json:"err,omitempty"` // the text of the error, or what was Left
}

// What says what happened.
type What string

// What happens to a request for a lock, a claim, a run or a limit.
const (
	Ask       What = "ask"       // the call begins
	Waiting   What = "waiting"   // the call found that it has to wait
	Granted   What = "granted"   // the call succeeded. A Claim: its transaction is the first. A Once: its function has begun, which writes the event
	Refused   What = "refused"   // the call failed, and nothing is held. A Claim: another transaction has committed. A Once with Period: that run has begun before
	Withdrawn What = "withdrawn" // the call ended with its context, MaxWait or Locker, and nothing is held
	Unknown   What = "unknown"   // the call, or the end of the lock's transaction, ended without an answer: it may have had its effect, or have it later
)

// What happens to a lock that was granted.
const (
	Renewed    What = "renewed"     // the deadline moved
	Held       What = "held"        // a check that began at Began found the lock held: Err, Renew, or an Err of its context
	Lost       What = "lost"        // the holder noticed the loss; a Release or a Fence may be what returned it
	ReleaseAsk What = "release-ask" // a Release or Close begins; for locks of transactions, the commit or rollback
	Released   What = "released"    // that succeeded. Of a Once: its function has returned
	StepsDown  What = "steps-down"  // a leader noticed that it was asked to step down
)

// What happens to a transaction that writes under a lock, and to one that claims.
const (
	WriteAsk     What = "write-ask"     // the transaction begins, before its fence
	CommitAsk    What = "commit-ask"    // a commit begins; also of a Claim
	Wrote        What = "wrote"         // it is committed
	WriteRefused What = "write-refused" // the fence or the commit was refused: nothing is written
	WriteUnknown What = "write-unknown" // no answer of the commit came
	Row          What = "row"           // the server has the row at the end of the run: Process, Op, Write, Key and Token are its columns
	Committed    What = "committed"     // the transaction of a Claim is committed
	RolledBack   What = "rolled-back"   // the transaction of a Claim is not committed
)

// What happens around the locks.
const (
	FaultBegun  What = "fault"       // before a fault begins
	FaultEnded  What = "fault-ended" // after its last effect has ended; a fault without an end lasts until the end of the run
	Connections What = "connections" // N connections of the process Target were counted at the server; Limit may be
	Left        What = "left"        // N of what Err names are left, 0: it was looked for. Of a request: after it had failed; else at the end of a run, one TTL after the last process ended
)

// Kind says which kind of lock, claim, run or limit is asked for.
type Kind string

// The kinds.
const (
	Lease      Kind = "lease"
	LeaseAsync Kind = "lease-async"
	Advisory   Kind = "advisory"
	Permit     Kind = "permit"
	Limit      Kind = "limit"
	Claim      Kind = "claim"
	Once       Kind = "once"
	Tx         Kind = "tx"        // LockTx
	Set        Kind = "set"       // AcquireAll: an Ask for each of the keys
	DoTx       Kind = "dotx"      // granted when its function is called
	Lead       Kind = "lead"      // an Ask for each term
	StepDown   Kind = "step-down" // that the leader steps down; Granted: the request is delivered
)

// Fault names what was done to a process, a connection or the server.
type Fault string

// The faults. Each lasts from FaultBegun to FaultEnded.
const (
	Kill         Fault = "kill"          // a process dies
	Freeze       Fault = "freeze"        // a process is stopped for a while
	Cut          Fault = "cut"           // connections are cut
	Delay        Fault = "delay"         // messages are late
	Swallow      Fault = "swallow"       // messages of one direction get lost
	LoseAnswer   Fault = "lose-answer"   // the answer of a commit gets lost
	Terminate    Fault = "terminate"     // a session is ended by an administrator
	Crash        Fault = "crash"         // the server crashes, and comes back
	Restart      Fault = "restart"       // the server is restarted
	FreezeServer Fault = "freeze-server" // the server's processes are stopped for a while
	Promote      Fault = "promote"       // a synchronous standby is promoted
	PromoteAsync Fault = "promote-async" // an asynchronous standby is promoted: commits may be lost
	ClockJump    Fault = "clock-jump"    // the server's clock jumps
	Exhaust      Fault = "exhaust"       // the server has no connection to give
	LockTable    Fault = "lock-table"    // the server's lock table is full
	Timeouts     Fault = "timeouts"      // statement and lock timeouts end statements
	Pause        Fault = "pause"         // a pooler is paused or restarted
	Close        Fault = "close"         // a Locker is closed while its callers wait
	Evict        Fault = "evict"         // an administrator evicts a holder; FaultEnded without Err: it has the lock no longer
)
