//! One campaign: the faults of a plan in a random order, then the check.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use everbus::Bus;
use everbus_core::{DeadLetterFilter, EventId, GroupInfo, PageRequest};
use tokio::task::{JoinHandle, block_in_place};

use super::publisher::{Published, publish};
use super::workers::{SharedReports, Worker};
use super::{Figures, GROUPS, LEASE, Place, Plan, Server, Subject};
use crate::chaos::content::Content;
use crate::chaos::say;
use crate::model::Random;
use crate::servers::Proxy;

const PUBLISHERS: u64 = 3;
const WORKERS: usize = 2;
/// After a fault at least this many more events must be acknowledged and handled.
const PROGRESS: u64 = 10;
/// Publishers and workers that make no progress for this long are stuck.
const PATIENCE: Duration = Duration::from_secs(120);
/// If no event ends for this long after the last fault, those that have not ended are lost. Longer than leases
/// and retries, also on a busy machine.
const STUCK: Duration = Duration::from_secs(60);
/// A cut that has not met its request by then is replaced by a plain one.
const ARMED: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug)]
enum Fault {
    ServerKill,
    WorkerKill,
    Cut,
    Pause,
    Stop,
}

impl Plan {
    fn shuffled(&self, random: &mut Random) -> Vec<Fault> {
        let mut faults = Vec::new();
        for (fault, n) in [
            (Fault::ServerKill, self.server_kills),
            (Fault::WorkerKill, self.worker_kills),
            (Fault::Cut, self.cuts),
            (Fault::Pause, self.pauses),
            (Fault::Stop, self.stops),
        ] {
            faults.extend(std::iter::repeat_n(fault, n));
        }
        for n in (1..faults.len()).rev() {
            faults.swap(n, random.below(n + 1));
        }
        faults
    }
}

struct Campaign<'a> {
    subject: &'a Subject,
    server: &'a dyn Server,
    plan: Plan,
    stuck: Duration,
    random: Random,
    proxies: Vec<Proxy>,
    /// Through the proxies.
    place: Place,
    workers: Vec<Worker>,
    started: u32,
    reports: SharedReports,
    published: Arc<Published>,
    figures: Figures,
}

/// Runs the plan against a server. `url` is the URL of the engine, without a proxy. Needs a runtime with
/// several threads. Prints the seed at the start and the figures at the end.
pub async fn campaign(
    subject: &Subject,
    server: &dyn Server,
    url: &str,
    plan: Plan,
    seed: u64,
) -> Figures {
    campaign_with(subject, server, url, plan, seed, STUCK).await
}

/// As [`campaign`]. If no event ends for the time `stuck`, the events that have not ended are lost.
pub async fn campaign_with(
    subject: &Subject,
    server: &dyn Server,
    url: &str,
    plan: Plan,
    seed: u64,
    stuck: Duration,
) -> Figures {
    say(&format!("campaign EVERBUS_SEED={seed}: {plan:?}"));
    let begin = Instant::now();
    let folder = tempfile::tempdir().unwrap();
    let (mut proxies, mut through) = (Vec::new(), url.to_owned());
    let mut listen = server.proxy_ports().into_iter();
    for port in server.ports() {
        let proxy = Proxy::start_on(listen.next().unwrap_or(0), port).await;
        let (direct, behind) = (
            format!("127.0.0.1:{port}"),
            format!("127.0.0.1:{}", proxy.port()),
        );
        through = through.replace(&direct, &behind);
        proxies.push(proxy);
    }
    let mut campaign = Campaign {
        subject,
        server,
        plan,
        stuck,
        random: Random::new(seed),
        proxies,
        place: Place {
            url: through,
            folder: folder.path().to_owned(),
        },
        workers: Vec::new(),
        started: 0,
        reports: SharedReports::default(),
        published: Arc::default(),
        figures: Figures {
            seed,
            ..Figures::default()
        },
    };
    campaign.run(url).await;
    let mut figures = campaign.figures;
    figures.took = begin.elapsed();
    say(&figures.to_string());
    figures
}

impl Campaign<'_> {
    async fn run(&mut self, url: &str) {
        // The groups are declared before anything is published.
        for _ in 0..WORKERS {
            let worker = self.worker();
            self.workers.push(worker);
        }
        self.ready().await;
        let engine = (self.subject.open)(self.place.clone()).await.unwrap();
        let bus = Bus::builder().with_engine(engine).unwrap();
        let publishers: Vec<JoinHandle<()>> = (0..PUBLISHERS)
            .map(|n| {
                let seed = self.figures.seed.wrapping_mul(31).wrapping_add(n);
                let (published, reports) = (Arc::clone(&self.published), self.reports.clone());
                tokio::spawn(publish(bus.clone(), seed, published, reports))
            })
            .collect();
        self.progress("the start").await;
        for fault in self.plan.shuffled(&mut self.random) {
            if !self.figures.problems.is_empty() || !self.published.problems().is_empty() {
                break;
            }
            self.inject(fault).await;
            self.watch_workers();
            self.progress(&format!("{fault:?}")).await;
        }
        self.published.stop.store(true, Ordering::Relaxed);
        for publisher in publishers {
            publisher.await.unwrap();
        }
        self.drain(url).await;
        self.finish();
        let _ = bus.shutdown_within(Duration::from_secs(20)).await;
    }

    async fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::ServerKill => {
                block_in_place(|| self.server.kill());
                tokio::time::sleep(self.up_to(500)).await;
                block_in_place(|| self.server.restart());
                self.figures.server_kills += 1;
            }
            Fault::WorkerKill => {
                let n = self.random.below(self.workers.len());
                let worker = self.worker();
                // The old one is killed here.
                block_in_place(|| self.workers[n] = worker);
                self.figures.worker_kills += 1;
            }
            Fault::Cut => self.cut().await,
            Fault::Pause => {
                self.server.pause();
                tokio::time::sleep(self.plan.pause).await;
                self.server.resume();
                self.figures.pauses += 1;
            }
            Fault::Stop => {
                let n = self.random.below(self.workers.len());
                block_in_place(|| self.workers[n].stop());
                tokio::time::sleep(LEASE + self.up_to(2000)).await;
                self.workers[n].go_on();
                self.figures.stops += 1;
            }
        }
    }

    /// Cuts a connection, mostly before a reply. Does not wait for a request that does not come.
    async fn cut(&mut self) {
        if self.proxies.is_empty() {
            return;
        }
        let n = self.random.below(self.proxies.len());
        if self.random.one_in(4) {
            self.proxies[n].cut();
            return;
        }
        self.proxies[n].cut_before_reply(1 + self.random.below(40) as u64);
        let begin = Instant::now();
        while self.proxies[n].is_armed() {
            if begin.elapsed() > ARMED {
                self.proxies[n].heal();
                self.proxies[n].cut();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn worker(&mut self) -> Worker {
        self.started += 1;
        Worker::spawn(self.subject, &self.place, self.started, &self.reports)
    }

    async fn ready(&mut self) {
        let begin = Instant::now();
        let is_ready = |worker: &Worker| self.reports.lock().ready.contains(&worker.number());
        while !self.workers.iter().all(is_ready) {
            let errors = &self.reports.lock().errors.join("\n");
            assert!(begin.elapsed() < PATIENCE, "no worker starts: {errors}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until publishers and workers have gone on after a fault.
    async fn progress(&mut self, after: &str) {
        let now = || {
            let acked = self.published.acked().len() as u64;
            (acked, self.reports.lock().total)
        };
        let (acked, handled) = now();
        let begin = Instant::now();
        loop {
            let (more, done) = now();
            if more >= acked + PROGRESS && done >= handled + PROGRESS {
                return;
            }
            if begin.elapsed() > PATIENCE || !self.published.problems().is_empty() {
                self.figures.problems.push(format!(
                    "after {after}: {} acknowledged and {} handled in {:?}",
                    more - acked,
                    done - handled,
                    begin.elapsed()
                ));
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// A worker never ends by itself.
    fn watch_workers(&mut self) {
        let ended: Vec<String> = self.workers.iter_mut().filter_map(Worker::ended).collect();
        self.figures.problems.extend(ended);
    }

    /// Waits until every acknowledged event has ended in every group. If there is no progress, the other events are lost.
    async fn drain(&mut self, url: &str) {
        let place = Place {
            url: url.to_owned(),
            ..self.place.clone()
        };
        // A cluster may still elect a leader.
        let engine = super::worker::open(*self.subject, &place);
        let engine = tokio::time::timeout(self.stuck, engine).await;
        let engine = engine.expect("the server answers").unwrap();
        let bus = Bus::builder().with_engine(engine).unwrap();
        let (mut least, mut progress) = (usize::MAX, Instant::now());
        loop {
            let dead = self.dead_letters(&bus).await;
            let owed = self.owed(&dead);
            self.figures.dead_letters = dead.len();
            if owed.len() < least {
                (least, progress) = (owed.len(), Instant::now());
            }
            if owed.is_empty() || progress.elapsed() > self.stuck {
                let told = |(group, id): &(usize, EventId)| {
                    let name = GROUPS[*group].name;
                    format!("{id} was neither handled nor given up by {name}")
                };
                self.figures.lost = owed.iter().map(told).collect();
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        if self.figures.lost.is_empty() {
            self.settled(&bus).await;
        }
        let _ = bus.shutdown_within(Duration::from_secs(20)).await;
    }

    /// Waits until the engine owes the groups nothing more: a delivery that stays in flight or waiting after its
    /// handler ran was never settled.
    async fn settled(&mut self, bus: &Bus) {
        let begin = Instant::now();
        loop {
            let mut groups = bus.engine().broker.inspect().await.unwrap_or_default();
            groups.retain(|info| GROUPS.iter().any(|group| group.name == info.name.as_str()));
            let owed = |info: &GroupInfo| info.behind + info.in_flight + info.waiting;
            if groups.len() == GROUPS.len() && groups.iter().all(|info| owed(info) == 0) {
                return;
            }
            if begin.elapsed() > self.stuck {
                let told = |info: &GroupInfo| {
                    let (name, behind) = (&info.name, info.behind);
                    let (in_flight, waiting) = (info.in_flight, info.waiting);
                    format!("{name}: {behind} behind, {in_flight} in flight, {waiting} waiting")
                };
                let told: Vec<String> = groups.iter().map(told).collect();
                let problem = format!("not settled although all was handled: {told:?}");
                self.figures.problems.push(problem);
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// The events that have not ended, with their group.
    fn owed(&self, dead: &HashSet<(usize, EventId)>) -> Vec<(usize, EventId)> {
        let reports = self.reports.lock();
        let acked = self.published.acked();
        let wanted = acked.iter().flat_map(|id| {
            let content = Content::of(*id);
            let groups = (0..GROUPS.len()).filter(move |group| content.is_wanted_by(*group));
            groups.map(|group| (group, *id))
        });
        let ended = |pair: &(usize, EventId)| {
            reports.handled.contains_key(pair)
                || reports.skipped.contains(pair)
                || dead.contains(pair)
        };
        wanted.filter(|pair| !ended(pair)).collect()
    }

    /// The dead letters of the groups. Checks their content.
    async fn dead_letters(&mut self, bus: &Bus) -> HashSet<(usize, EventId)> {
        let mut dead = HashSet::new();
        let mut page = PageRequest {
            limit: 1000,
            ..PageRequest::default()
        };
        loop {
            let letters = bus.dead_letters();
            let read = letters.list_page(DeadLetterFilter::default(), page.clone());
            let read = read.await.unwrap();
            for letter in &read.items {
                let id = letter.event().id();
                let name = letter.group.as_str();
                let Some(group) = GROUPS.iter().position(|group| group.name == name) else {
                    continue;
                };
                let whole = letter.event().payload().as_ref() == Content::of(id).payload;
                let told = letter.failures.iter().all(|f| !f.error.is_empty());
                if (!whole || !told || letter.failures.is_empty()) && dead.insert((group, id)) {
                    let flaw = format!("{id} is a dead letter of {name} without what it needs");
                    self.figures.problems.push(flaw);
                }
                dead.insert((group, id));
            }
            match read.next {
                Some(next) => page.after = Some(next),
                None => return dead,
            }
        }
    }

    fn finish(&mut self) {
        self.watch_workers();
        for worker in self.workers.drain(..) {
            let problem = block_in_place(|| worker.end(Duration::from_secs(60)));
            self.figures.problems.extend(problem);
        }
        let reports = self.reports.lock();
        let figures = &mut self.figures;
        figures.problems.extend(reports.errors.iter().cloned());
        figures
            .problems
            .extend(self.published.problems().iter().cloned());
        figures.acknowledged = self.published.acked().len();
        figures.repeated = self.published.repeated.load(Ordering::Relaxed);
        figures.unknown = self.published.unknown.load(Ordering::Relaxed);
        figures.handled = reports.handled.len();
        figures.duplicates = reports.handled.values().map(|n| u64::from(n - 1)).sum();
        figures.late_verdicts = reports.lost_leases.values().sum();
        figures.cuts = self.proxies.iter().map(Proxy::cuts).sum();
    }

    fn up_to(&mut self, milliseconds: usize) -> Duration {
        Duration::from_millis(self.random.below(milliseconds) as u64)
    }
}
