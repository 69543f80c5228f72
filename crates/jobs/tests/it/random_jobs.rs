//! Random jobs, and what each of them must come to.

use everbus_jobs::events::{Json, TaskSpec, TaskState, TaskStatuses};
use serde_json::json;

/// A small generator, the same everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// A random graph; one task in twelve fails.
pub(crate) fn random_job(seed: u64, number: u64) -> (String, Vec<TaskSpec>) {
    let mut random = Random(seed ^ number.wrapping_mul(0x5851_f42d_4c95_7f2d));
    let id = format!("job-{number}");
    let total = 1 + random.below(12);
    let mut tasks = Vec::new();
    for n in 0..total {
        let parents = (0..random.below(4))
            .filter(|_| n > 0)
            .map(|_| random.below(n.max(1)));
        let mut parents: Vec<String> = parents.map(|p| format!("{id}.{p}")).collect();
        parents.sort();
        parents.dedup();
        let fails = random.below(12) == 0;
        tasks.push(TaskSpec {
            task_id: format!("{id}.{n}"),
            name: "work".to_owned(),
            depends_on: parents,
            input: Json::of(&json!({ "fail": fails })).unwrap(),
        });
    }
    (id, tasks)
}

/// What a job must come to.
pub(crate) fn model(tasks: &[TaskSpec]) -> TaskStatuses {
    let mut states = TaskStatuses::new();
    // Parents come first in these graphs.
    for task in tasks {
        let completed = |parent: &String| states[parent] == Some(TaskState::Completed);
        let state = if !task.depends_on.iter().all(completed) {
            None
        } else if task.input.get().contains("true") {
            Some(TaskState::Failed)
        } else {
            Some(TaskState::Completed)
        };
        states.insert(task.task_id.clone(), state);
    }
    states
}
