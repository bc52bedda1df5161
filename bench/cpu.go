package main

import "time"

// usage is the processor time that an op took: this process, with all that runs in
// it beside the op, and the processes of the server that the op asks.
type usage struct{ client, server time.Duration }

func (u usage) minus(before usage) usage {
	return usage{u.client - before.client, u.server - before.server}
}

func (u usage) plus(other usage) usage {
	return usage{u.client + other.client, u.server + other.server}
}

// usageOf reads the time used so far by this process, and by the process server with
// its children: those that live, and those that have ended.
func usageOf(server int) (usage, error) {
	ofServer, err := familyTime(server)
	if err != nil {
		return usage{}, err
	}
	ours, err := ownTime()
	return usage{ours, ofServer}, err
}
