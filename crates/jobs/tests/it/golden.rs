//! The events as the document shows them.

use everbus::dialects::{Dialect, encode};
use everbus::{Bus, Timestamp, TypedEvent};
use everbus_jobs::events::{
    JobCompleted, JobCreated, JobFailureDetected, JobTasksAdded, Properties, TYPES, TaskCompleted,
    TaskFailed, TaskHealthCheck, TaskHeartbeat, TaskPending, TaskProcessingFailed, TaskStarted,
    TaskTimeout, Work,
};
use everbus_jobs::{Jobs, Origin};
use serde_json::{Value, json};

/// The properties are read and written again without a difference, and the event has these names.
#[track_caller]
fn golden<P: Properties>(event_type: &str, properties: &Value) -> P {
    let typed: P = serde_json::from_value(properties.clone()).unwrap();
    assert_eq!(serde_json::to_value(&typed).unwrap(), *properties);
    assert_eq!(P::TYPE, event_type);
    typed
}

/// Fields that the document calls optional are left out, not null.
#[track_caller]
fn without<P: Properties>(properties: &Value, optional: &[&str]) {
    let mut less = properties.clone();
    for key in optional {
        assert!(
            less.as_object_mut().unwrap().remove(*key).is_some(),
            "{key}"
        );
    }
    golden::<P>(P::TYPE, &less);
}

// conformance: workflow/props-task-pending: the example, and a task without a job
#[test]
fn task_pending() {
    let example = json!({
        "requestId": "req-123", "jobId": "job-456", "name": "scrape-store", "dependsOn": []
    });
    golden::<TaskPending>("Task Pending", &example);
    without::<TaskPending>(&example, &["jobId", "dependsOn"]);
}

// conformance: workflow/props-task-started: the example
#[test]
fn task_processing_started() {
    let example = json!({
        "requestId": "req-123", "jobId": "job-456", "effectiveUntil": 1_707_300_645,
        "workerId": "worker-i-001", "processId": 12345
    });
    golden::<TaskStarted>("Task Processing Started", &example);
    without::<TaskStarted>(&example, &["jobId"]);
}

// conformance: workflow/props-task-processing-failed: the example and every category; a category that is not in the document is refused
#[test]
fn task_processing_failed() {
    let example = json!({
        "requestId": "req-123", "jobId": "job-456", "attemptNumber": 2, "error": "ETIMEDOUT",
        "errorCategory": "network"
    });
    golden::<TaskProcessingFailed>("Task Processing Failed", &example);
    without::<TaskProcessingFailed>(&example, &["jobId"]);
    for category in ["timeout", "network", "rate-limit", "server-error"] {
        let mut other = example.clone();
        other["errorCategory"] = category.into();
        let typed = golden::<TaskProcessingFailed>("Task Processing Failed", &other);
        assert!(typed.error_category.is_retryable());
        assert_eq!(typed.error_category.as_str(), category);
    }
    let mut other = example;
    other["errorCategory"] = "weather".into();
    assert!(serde_json::from_value::<TaskProcessingFailed>(other).is_err());
}

// conformance: workflow/props-task-completed: the example, and a task without usage
#[test]
fn task_completed() {
    let example = json!({
        "requestId": "req-123", "jobId": "job-456", "output": {"b": 1, "a": [1.5, null]},
        "durationMs": 45000, "exitCode": 0,
        "usage": {"inputTokens": 12000, "outputTokens": 3500, "cacheReadTokens": 8000}
    });
    golden::<TaskCompleted>("Task Completed", &example);
    without::<TaskCompleted>(&example, &["jobId", "usage"]);
    // The output keeps its bytes.
    let text = r#"{"requestId":"r","output":{"z":1.50,"a":12345678901234567890123},"durationMs":1,"exitCode":0}"#;
    let typed: TaskCompleted = serde_json::from_str(text).unwrap();
    assert_eq!(serde_json::to_string(&typed).unwrap(), text);
}

// conformance: workflow/props-task-failed: the example, both sources, every category
#[test]
fn task_failed() {
    let example = json!({
        "requestId": "req-123", "jobId": "job-456", "error": "Invalid API key", "errorCategory": "auth",
        "retryCount": 3, "source": "worker"
    });
    golden::<TaskFailed>("Task Failed", &example);
    without::<TaskFailed>(&example, &["jobId"]);
    for source in ["worker", "dlq", "producer"] {
        for category in ["auth", "validation", "programming", "cancelled"] {
            let mut other = example.clone();
            other["source"] = source.into();
            other["errorCategory"] = category.into();
            let typed = golden::<TaskFailed>("Task Failed", &other);
            assert!(!typed.error_category.is_retryable());
        }
    }
}

// conformance: workflow/props-task-timeout: the example, both signals
#[test]
fn task_timeout() {
    for signal in ["SIGKILL", "SIGTERM"] {
        let example = json!({
            "requestId": "req-123", "jobId": "job-456", "timeoutMs": 200_000, "elapsedMs": 200_050,
            "signal": signal
        });
        golden::<TaskTimeout>("Task Timeout", &example);
        without::<TaskTimeout>(&example, &["jobId"]);
    }
}

// conformance: workflow/props-task-heartbeat: the example
#[test]
fn task_heartbeat() {
    let example = json!({
        "requestId": "req-123", "effectiveUntil": 1_707_300_645, "heartbeatNumber": 3, "elapsedMs": 60000,
        "workerId": "worker-i-001", "processId": 12345, "memoryUsage": {"rss": 256_000_000},
        "lastActivity": {"type": "step_running", "stepName": "color-tags", "timestamp": 1_707_300_540}
    });
    golden::<TaskHeartbeat>("Task Heartbeat", &example);
    without::<TaskHeartbeat>(&example, &["memoryUsage", "lastActivity"]);
}

fn job_created() -> Value {
    json!({
        "jobId": "job-456", "requestId": "req-789",
        "tasks": [
            {"taskId": "task-A", "name": "scrape-store", "dependsOn": [], "input": {"storeId": "store-123"}},
            {"taskId": "task-B", "name": "analyze-competitors", "dependsOn": [], "input": {"market": "fashion"}},
            {"taskId": "task-C", "name": "color-tags", "dependsOn": ["task-A"], "input": {"style": "modern"}},
            {"taskId": "task-D", "name": "font-pairing", "dependsOn": ["task-A"], "input": {}},
            {"taskId": "task-E", "name": "compile-result", "dependsOn": ["task-C", "task-D"], "input": {}}
        ],
        "totalTasks": 5
    })
}

// conformance: workflow/props-job-created: the example
#[test]
fn job_created_as_in_the_document() {
    golden::<JobCreated>("Job Created", &job_created());
}

// conformance: workflow/props-job-tasks-added: the example
#[test]
fn job_tasks_added() {
    let example = json!({
        "jobId": "job-456",
        "newTasks": [
            {"taskId": "task-F", "name": "market-analysis", "dependsOn": ["task-A"], "input": {"depth": "detailed"}}
        ],
        "previousTotalTasks": 5, "totalTasksNow": 6
    });
    golden::<JobTasksAdded>("Job Tasks Added", &example);
}

// conformance: workflow/props-job-completed: the example
#[test]
fn job_completed() {
    let example = json!({
        "jobId": "job-456", "totalTasks": 5,
        "taskStatuses": {
            "task-A": "completed", "task-B": "completed", "task-C": "completed", "task-D": "completed",
            "task-E": "completed"
        }
    });
    golden::<JobCompleted>("Job Completed", &example);
}

// conformance: workflow/props-job-failure: the example, with null for a task that has not begun
#[test]
fn job_failure_detected() {
    let example = json!({
        "jobId": "job-456", "failedTaskId": "task-C",
        "taskStatuses": {
            "task-A": "completed", "task-B": "completed", "task-C": "failed", "task-D": "processing",
            "task-E": null
        }
    });
    golden::<JobFailureDetected>("Job Failure Detected", &example);
}

// conformance: workflow/props-health: the example
#[test]
fn task_health_check() {
    let example = json!({
        "summary": {"totalProcessing": 4, "healthy": 2, "warning": 1, "critical": 0, "overtime": 1},
        "tasks": [
            {"requestId": "req-123", "health": "healthy", "elapsed": 120_000, "timeSinceLastEvent": 15000,
             "lastEventType": "Task Heartbeat", "workerId": "worker-i-001"},
            {"requestId": "req-456", "health": "overtime", "elapsed": 3_800_000, "timeSinceLastEvent": 20000,
             "lastEventType": "Task Heartbeat", "workerId": "worker-i-002"}
        ]
    });
    golden::<TaskHealthCheck>("Task Health Check", &example);
}

async fn jobs_of(tenant: &str) -> Jobs {
    let bus = Bus::open("memory:").await.unwrap();
    Jobs::builder().tenant(tenant).open(bus).unwrap()
}

// conformance: workflow/context-values: source system, the environment, the origin, the worker; the default tenant and app
// conformance: workflow/task-stream: the ordering key is that of the job or the task
#[tokio::test]
async fn the_whole_event_is_the_one_of_the_document() {
    let jobs = jobs_of("gbinnovations").await;
    let started: TaskStarted = serde_json::from_value(json!({
        "requestId": "req-123", "effectiveUntil": 1_707_300_645, "workerId": "worker-abc123", "processId": 7
    }))
    .unwrap();
    let emitter = jobs.emitter(Origin::Worker).worker("worker-abc123");
    let event = emitter
        .event(&started)
        .id("ddf71f63-b036-4ac7-ad0f-77a7fdfca352"
            .parse::<everbus::EventId>()
            .unwrap())
        .occurred_at(Timestamp::from_micros(1_767_453_739_640_000))
        .build()
        .unwrap();
    assert_eq!(event.ordering_key().as_deref(), Some("TASK#req-123"));
    let document: Value =
        serde_json::from_slice(&encode(&event, Dialect::Workflow).unwrap()).unwrap();
    let mut wanted = json!({
        "PK": "TENANT#gbinnovations",
        "SK": "TIMESTAMP#1767453739640#EVENT#ddf71f63-b036-4ac7-ad0f-77a7fdfca352",
        "GSI1PK": "TASK#req-123",
        "GSI1SK": "TASK#TIMESTAMP#1767453739640",
        "GSI2PK": "APP#task-workflow",
        "GSI2SK": "TIMESTAMP#1767453739640",
        "GSI3PK": "APP#task-workflow",
        "GSI3SK": "TASK#req-123#TIMESTAMP#1767453739640",
        "GSI4PK": "EVENT#Task Processing Started",
        "GSI4SK": "TENANT#gbinnovations#TIMESTAMP#1767453739640",
        "GSI5PK": "EVENT#Task Processing Started",
        "GSI5SK": "TENANT#gbinnovations#TASK#req-123#TIMESTAMP#1767453739640",
        "GSI6PK": "EVENT#Task Processing Started",
        "GSI6SK": "TENANT#gbinnovations#APP#task-workflow#TIMESTAMP#1767453739640",
        "GSI7PK": "EVENT#Task Processing Started",
        "GSI7SK": "TENANT#gbinnovations#APP#task-workflow#TASK#req-123#TIMESTAMP#1767453739640",
        "entityId": "req-123",
        "entityType": "TASK",
        "tenantId": "gbinnovations",
        "eventType": "Task Processing Started",
        "timestamp": 1_767_453_739_640_u64,
        "context": {
            "source": "system", "environment": "prod", "origin": "worker", "workerId": "worker-abc123"
        }
    });
    wanted["properties"] = document["properties"].clone();
    assert_eq!(document["properties"]["requestId"], "req-123");
    assert_eq!(document, wanted);
}

#[tokio::test]
async fn job_events_have_the_keys_of_their_job() {
    let jobs = Jobs::new(Bus::open("memory:").await.unwrap()).unwrap();
    assert_eq!((jobs.tenant(), jobs.app()), ("default", "task-workflow"));
    let created: JobCreated = serde_json::from_value(job_created()).unwrap();
    for (origin, word) in [
        (Origin::Producer, "producer"),
        (Origin::Worker, "worker"),
        (Origin::Dispatcher, "dispatcher"),
        (Origin::HealthCheck, "health-check"),
    ] {
        let event = jobs.emitter(origin).event(&created).build().unwrap();
        assert_eq!(event.ordering_key().as_deref(), Some("JOB#job-456"));
        let document: Value =
            serde_json::from_slice(&encode(&event, Dialect::Workflow).unwrap()).unwrap();
        assert_eq!(document["GSI1PK"], "JOB#job-456");
        let context = json!({"source": "system", "environment": "prod", "origin": word});
        assert_eq!(document["context"], context);
    }
}

// conformance: workflow/task-stream: one stream has all types; a bus that splits them is refused
#[tokio::test]
async fn all_types_share_one_stream() {
    use everbus::{Stream, Streams};
    let stream = Jobs::stream().unwrap();
    assert_eq!(&*stream.name, "tasks");
    assert!(TYPES.iter().all(|event_type| stream.covers(event_type)));
    let open = async |streams| {
        let bus = Bus::builder()
            .streams(streams)
            .open("memory:")
            .await
            .unwrap();
        Jobs::new(bus)
    };
    open(Streams::new([stream]).unwrap()).await.unwrap();
    let (some, rest) = TYPES.split_at(5);
    let split = [
        Stream::new("a", some).unwrap(),
        Stream::new("b", rest).unwrap(),
    ];
    let error = open(Streams::new(split).unwrap()).await.unwrap_err();
    assert!(error.message().contains("in the stream a"), "{error}");
}

// conformance: workflow/task-work: the message has requestId, jobId if there is one, name and input; it is about no entity
#[tokio::test]
async fn the_work_message_is_about_no_task() {
    let example = json!({"requestId": "r", "jobId": "j", "name": "n", "input": {"a": 1}});
    let work = golden::<Work>("task.work", &example);
    without::<Work>(&example, &["jobId"]);
    let jobs = jobs_of("acme").await;
    let event = jobs.emitter(Origin::Producer).event(&work).build().unwrap();
    assert_eq!(event.attributes().unwrap().entity, None);
    assert_eq!(event.ordering_key().as_deref(), Some("JOB#j"));
    assert_eq!(Work::TYPE, everbus_jobs::WORK);
}
