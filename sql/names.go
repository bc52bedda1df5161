package statements

// A Name is the file of a statement in this directory, without .sql.
type Name string

// In advisory/.
const (
	AdvisoryBatch          Name = "advisory/batch"
	AdvisoryFence          Name = "advisory/fence"
	AdvisoryFunctions      Name = "advisory/functions"
	AdvisoryHolders        Name = "advisory/holders"
	AdvisoryLockSession    Name = "advisory/lock_session"
	AdvisoryPrepare        Name = "advisory/prepare"
	AdvisoryPrepareHolders Name = "advisory/prepare_holders"
	AdvisoryPrepareToken   Name = "advisory/prepare_token"
	AdvisoryProbe          Name = "advisory/probe"
	AdvisoryPublishNames   Name = "advisory/publish_names"
	AdvisoryReapTokens     Name = "advisory/reap_tokens"
)

// In conn/.
const (
	ConnAsync         Name = "conn/async"
	ConnBackend       Name = "conn/backend"
	ConnCluster       Name = "conn/cluster"
	ConnGuard         Name = "conn/guard"
	ConnKeeps         Name = "conn/keeps"
	ConnReadCommitted Name = "conn/read_committed"
	ConnReadOnly      Name = "conn/read_only"
	ConnReadWrite     Name = "conn/read_write"
	ConnSearchPath    Name = "conn/search_path"
	ConnSession       Name = "conn/session"
	ConnWorker        Name = "conn/worker"
)

// In doctor/.
const (
	DoctorCitus             Name = "doctor/citus"
	DoctorClaims            Name = "doctor/claims"
	DoctorClock             Name = "doctor/clock"
	DoctorCollation         Name = "doctor/collation"
	DoctorCollationDatabase Name = "doctor/collation_database"
	DoctorConnections       Name = "doctor/connections"
	DoctorDirty             Name = "doctor/dirty"
	DoctorEscalation        Name = "doctor/escalation"
	DoctorExpired           Name = "doctor/expired"
	DoctorLockTable         Name = "doctor/lock_table"
	DoctorNodes             Name = "doctor/nodes"
	DoctorPrepared          Name = "doctor/prepared"
	DoctorRights            Name = "doctor/rights"
	DoctorRole              Name = "doctor/role"
	DoctorRowSecurity       Name = "doctor/row_security"
	DoctorRuns              Name = "doctor/runs"
	DoctorSearchPath        Name = "doctor/search_path"
	DoctorSettings          Name = "doctor/settings"
	DoctorSnapshots         Name = "doctor/snapshots"
	DoctorStandbys          Name = "doctor/standbys"
	DoctorTableLocks        Name = "doctor/table_locks"
	DoctorTables            Name = "doctor/tables"
	DoctorTokens            Name = "doctor/tokens"
	DoctorWraparound        Name = "doctor/wraparound"
)

// In leader/.
const (
	LeaderAskToStepDown Name = "leader/ask_to_step_down"
	LeaderStepDowns     Name = "leader/step_downs"
)

// In evict/.
const (
	EvictAdvisory  Name = "evict/advisory"
	EvictLease     Name = "evict/lease"
	EvictReasons   Name = "evict/reasons"
	EvictTerminate Name = "evict/terminate"
)

// In lease/.
const (
	LeaseAcquire       Name = "lease/acquire"
	LeaseAcquireOne    Name = "lease/acquire_one"
	LeaseAcquirePermit Name = "lease/acquire_permit"
	LeaseAcquireShared Name = "lease/acquire_shared"
	LeaseChange        Name = "lease/change"
	LeaseFence         Name = "lease/fence"
	LeaseFenceShared   Name = "lease/fence_shared"
	LeaseHolders       Name = "lease/holders"
	LeaseReap          Name = "lease/reap"
	LeaseRelease       Name = "lease/release"
	LeaseReleaseOne    Name = "lease/release_one"
	LeaseHandOver      Name = "lease/hand_over"
	LeaseReleaseShared Name = "lease/release_shared"
	LeaseRenew         Name = "lease/renew"
	LeaseRenewShared   Name = "lease/renew_shared"
	LeaseShareHeld     Name = "lease/share_held"
)

// In monitor/.
const (
	MonitorAdvisory  Name = "monitor/advisory"
	MonitorEvictions Name = "monitor/evictions"
	MonitorLeases    Name = "monitor/leases"
	MonitorMigrators Name = "monitor/migrators"
	MonitorNames     Name = "monitor/names"
	MonitorRole      Name = "monitor/role"
	MonitorServer    Name = "monitor/server"
	MonitorSession   Name = "monitor/session"
	MonitorSettings  Name = "monitor/settings"
	MonitorTickets   Name = "monitor/tickets"
)

// In once/.
const (
	OnceDue    Name = "once/due"
	OnceFinish Name = "once/finish"
	OnceList   Name = "once/list"
	OnceStart  Name = "once/start"
)

// In queue/.
const (
	QueueAlive         Name = "queue/alive"
	QueueListen        Name = "queue/listen"
	QueueListenHolder  Name = "queue/listen_holder"
	QueueNotify        Name = "queue/notify"
	QueueNotifyHolders Name = "queue/notify_holders"
	QueuePublish       Name = "queue/publish"
	QueueReap          Name = "queue/reap"
	QueueRefused       Name = "queue/refused"
	QueueWaitedFor     Name = "queue/waited_for"
	QueueWake          Name = "queue/wake"
	QueueWithdraw      Name = "queue/withdraw"
)

// In ratelimit/.
const (
	RatelimitReap Name = "ratelimit/reap"
	RatelimitTake Name = "ratelimit/take"
)

// In tx/.
const (
	TxAnswer        Name = "tx/answer"
	TxAnswerRequest Name = "tx/answer_request"
	TxAsk           Name = "tx/ask"
	TxClaim         Name = "tx/claim"
	TxClaimRequest  Name = "tx/claim_request"
	TxInTransaction Name = "tx/in_transaction"
	TxKept          Name = "tx/kept"
	TxLock          Name = "tx/lock"
	TxLockAll       Name = "tx/lock_all"
	TxLockWithin    Name = "tx/lock_within"
	TxPurgeClaims   Name = "tx/purge_claims"
	TxReadAnswer    Name = "tx/read_answer"
	TxShared        Name = "tx/shared"
	TxTryLock       Name = "tx/try_lock"
	TxVersion       Name = "tx/version"
	TxVouch         Name = "tx/vouch"
)
