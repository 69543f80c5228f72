//! A task, as a handler in this process receives it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::SystemTime;

use everbus::core::BoxFuture;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::events::{ErrorCategory, Json, Usage};
use crate::worker::child::ReportedActivity;

/// A task, as a handler receives it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Task {
    /// Its id.
    pub request_id: String,
    /// Its job, if it is part of one.
    pub job_id: Option<String>,
    /// The name of the work.
    pub name: String,
    /// The input of the task. A dependent task also gets the outputs of its parents, as `dependencyOutputs`.
    pub input: Json,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    pub(super) reports: Arc<Reports>,
}

/// The reports of a running handler.
#[derive(Debug, Default)]
pub(super) struct Reports {
    pub(super) activity: Mutex<Option<(ReportedActivity, SystemTime)>>,
    pub(super) usage: Mutex<Option<Usage>>,
}

impl Task {
    /// Deserialises the input. If that fails, the error has the category `validation`.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, TaskError> {
        let read = serde_json::from_str(self.input.get());
        read.map_err(|error| TaskError::new(ErrorCategory::Validation, error.to_string()))
    }

    /// Reports the current activity: its kind (`step_running`, `sdk_query`, `waiting`) and the name of the step. The
    /// next heartbeat has it.
    pub fn activity(&self, kind: impl Into<String>, step: Option<&str>) {
        let activity = ReportedActivity {
            kind: kind.into(),
            step_name: step.map(str::to_owned),
        };
        *self.reports.activity.lock() = Some((activity, SystemTime::now()));
    }

    /// Reports the tokens that a language model has used, for `Task Completed`.
    pub fn usage(&self, usage: Usage) {
        *self.reports.usage.lock() = Some(usage);
    }
}

/// The error of a handler. Its category decides whether there is another attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskError {
    /// The category. `None`: the message is classified, like the standard error of a child.
    pub category: Option<ErrorCategory>,
    /// What went wrong.
    pub message: String,
}

impl TaskError {
    /// A failure of this category.
    pub fn new(category: ErrorCategory, message: impl Into<String>) -> Self {
        Self {
            category: Some(category),
            message: message.into(),
        }
    }
}

impl fmt::Display for TaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

// `TaskError` does not implement `std::error::Error`: then this conversion would overlap with `From<T> for T`.
impl<E: std::error::Error> From<E> for TaskError {
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            message.push_str(": ");
            message.push_str(&error.to_string());
            cause = error.source();
        }
        Self {
            category: None,
            message,
        }
    }
}

/// A handler of tasks.
pub(super) type TaskHandler =
    Arc<dyn Fn(Task) -> BoxFuture<'static, Result<Json, TaskError>> + Send + Sync>;

/// Makes a handler from a function.
pub(super) fn handler<F, R, T>(function: F) -> TaskHandler
where
    F: Fn(Task) -> R + Send + Sync + 'static,
    R: Future<Output = Result<T, TaskError>> + Send + 'static,
    T: Serialize + 'static,
{
    Arc::new(move |task| {
        let run = function(task);
        Box::pin(async move {
            let output = run.await?;
            Json::of(&output).map_err(|error| {
                let what = format!("the output cannot be written as JSON: {error}");
                TaskError::new(ErrorCategory::Programming, what)
            })
        })
    })
}
