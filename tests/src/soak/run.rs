//! Runs the soak test: bursts of faults, each followed by a quiet period and checks.

use std::{fs::File, io::Write, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use futures::future::join_all;
use krypton_tests::{fleet::FleetClient, wait::eventually_within};
use kube::Client;
use tempfile::TempDir;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{
    Args, carry,
    expected_state::ExpectedState,
    hubs,
    judgement::{self, Expected, Violation},
    person::{Person, insist},
    plan::{Burst, Plan, Shape, Step},
    report::{Summary, load_average},
    say,
    snapshot::{self, EdgeSeen, Snapshot},
    stage::{REPLICAS, Stage, VERSIONS, message},
    whom::Edge,
    witness::Witness,
};

/// Exceeds the duration of all repeated user actions.
const PEOPLE: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Deadline for the concurrent installation of all Tenants.
const FIRST: Duration = Duration::from_secs(300);
const FIRST_EACH: Duration = Duration::from_secs(10);
/// Interval between the first good check and the last check of a quiet period, during which nothing may change.
const STAYS: Duration = Duration::from_secs(5);

pub(crate) async fn run(args: &Args) -> Result<()> {
    let folder = TempDir::with_prefix("krypton-soak-").context("creating a folder for logs")?;
    let mut summary = Summary {
        seed: args.seed,
        tenants: args.tenants.into(),
        hubs: args.hubs.into(),
        settle: Duration::from_secs(args.settle),
        ..Summary::default()
    };
    let outcome = Box::pin(soak(args, folder.path(), &mut summary)).await;
    let text = summary.markdown();
    println!("{text}");
    if let Some(file) = &args.markdown {
        append(file, &text)?;
    }
    if outcome.is_err() || !summary.violations.is_empty() {
        say(&format!("logs are kept in {}", folder.keep().display()));
    }
    outcome?;
    match summary.violations.len() {
        0 => Ok(()),
        count => bail!("seed {}: {count} violations", args.seed),
    }
}

fn append(file: &Path, text: &str) -> Result<()> {
    let write = || {
        let mut file = File::options().create(true).append(true).open(file)?;
        writeln!(file, "\n{}", text.trim_end())
    };
    write().with_context(|| format!("writing {}", file.display()))
}

async fn soak(args: &Args, logs: &Path, summary: &mut Summary) -> Result<()> {
    say(&format!(
        "seed {}: starting three control planes, hubs ({}) and agent",
        args.seed, args.hubs
    ));
    let stage = Box::pin(Stage::set(args.hubs.into(), logs)).await?;
    let home = stage.home.client();
    let shape = Shape {
        seed: args.seed,
        tenants: args.tenants.into(),
        hubs: args.hubs.into(),
    };
    let plan = Plan::new(shape);
    let expected_state = Arc::new(ExpectedState::new(Expected {
        repository: stage.repository.url(),
        version: VERSIONS[0].to_owned(),
        message: message(0),
        replicas: REPLICAS,
        hubs: args.hubs.into(),
        ..Expected::default()
    }));
    let _witnesses =
        Edge::ALL.map(|edge| Witness::start(edge, &stage.site(edge).client, &expected_state));
    let _at_home = Witness::of_leads(&home, &expected_state);
    let mut run = Run {
        stage: &stage,
        home: &home,
        expected_state: &expected_state,
        summary,
        timeline: File::create(logs.join("timeline.txt")).context("creating the timeline")?,
        true_after: Duration::ZERO,
    };
    run.begin(&plan).await?;
    let begun = Instant::now();
    let end = begun + Duration::from_secs(60 * args.minutes);
    for burst in plan {
        if Instant::now() >= end || !run.summary.violations.is_empty() {
            break;
        }
        let outcome = run.burst(&burst).await;
        run.summary.lasted = begun.elapsed();
        // The logs are most useful after a failure.
        stage.keep_logs().await?;
        run.summary.helm_runs = stage.helm_runs()?;
        outcome?;
        run.summary.epoch = FleetClient::at(&stage.home).hub_epoch().await?;
    }
    Ok(())
}

struct Run<'a> {
    stage: &'a Stage,
    home: &'a Client,
    expected_state: &'a Arc<ExpectedState>,
    summary: &'a mut Summary,
    timeline: File,
    /// Time from the start of the last quiet period until the state was as expected.
    true_after: Duration,
}

impl Run<'_> {
    fn people(&self) -> [Person<'_>; 2] {
        Edge::ALL.map(|edge| Person::at(self.stage.site(edge), self.home, self.expected_state))
    }

    /// Installs all Tenants before the first fault.
    async fn begin(&mut self, plan: &Plan) -> Result<()> {
        let first = plan.first();
        let creating = first.iter().map(async |(tenant, workspace)| {
            let site = self.stage.site(tenant.edge());
            let person = Person::at(site, self.home, self.expected_state);
            person.create(*tenant, *workspace).await
        });
        for created in join_all(creating).await {
            created?;
        }
        let patience = FIRST + FIRST_EACH * u32::try_from(first.len()).unwrap_or(u32::MAX);
        let begun = Instant::now();
        let found = self.until_true(begun, patience).await?;
        if let Some(found) = found {
            self.summary.violations = found;
            bail!("the Tenants are not installed after {patience:?}, before any fault");
        }
        say(&format!(
            "{} Tenants are installed after {:.0} s",
            first.len(),
            begun.elapsed().as_secs_f64()
        ));
        Ok(())
    }

    async fn burst(&mut self, burst: &Burst) -> Result<()> {
        let begun = Instant::now();
        self.note(&format!("burst {} of {:?}", burst.number, burst.length));
        let carried = timeout(
            burst.length + PEOPLE,
            join_all(burst.steps.iter().map(|step| self.step(step, begun))),
        );
        let carried = carried.await.context("the faults of a burst did not end")?;
        for (step, (outcome, entry)) in burst.steps.iter().zip(carried) {
            *self.summary.faults.entry(step.fault.kind()).or_default() += 1;
            let outcome = match outcome {
                Ok(()) => String::new(),
                // The target was missing, or disappeared too early.
                Err(error) => {
                    self.summary.skipped += 1;
                    format!(": {error:#}")
                }
            };
            self.note(&format!("{entry}{outcome}"));
        }
        sleep_until(begun + burst.length).await;
        let late = begun.elapsed().saturating_sub(burst.length);
        self.stage.good_again()?;
        self.stage.all_run().await?;
        let faults_over = Instant::now();
        self.stage.clusters_are_well().await?;
        let well = faults_over.elapsed().as_secs_f64();
        let undone = insist(self.people()).await?;
        self.note(&format!(
            "quiet; the clusters were ready after {well:.1} s; {undone} user actions repeated"
        ));

        let quiet = Instant::now();
        let found = self.until_true(quiet, self.summary.settle).await?;
        let taken = self.true_after;
        self.summary.bursts += 1;
        let load = load_average();
        self.summary.load = self.summary.load.max(load);
        let result = match &found {
            None => {
                self.summary.truths.push(taken);
                format!(
                    "all promises kept after {:.1} s of quiet",
                    taken.as_secs_f64()
                )
            }
            Some(found) => format!("{} violations", found.len()),
        };
        let line = format!(
            "burst {}: {} faults in {} s (+{} s), {result}; {} live Tenants, load {load:.1}",
            burst.number,
            burst.steps.len(),
            burst.length.as_secs(),
            late.as_secs(),
            self.expected_state.expected().tenants.len()
        );
        say(&line);
        self.note(&line);
        if let Some(found) = found {
            for violation in &found {
                let line = format!("  {}: {}", violation.promise, violation.story);
                say(&line);
                self.note(&line);
            }
            self.summary.violations = found;
        }
        Ok(())
    }

    async fn step(&self, step: &Step, begun: Instant) -> (Result<()>, String) {
        sleep_until(begun + step.at).await;
        let from = jiff::Timestamp::now();
        let carried = carry::carry_out(&step.fault, self.stage, self.home, self.expected_state);
        let outcome = Box::pin(carried).await;
        let entry = format!("  {from} to {}: {:?}", jiff::Timestamp::now(), step.fault);
        (outcome, entry)
    }

    /// Checks until the state is as expected, and still is a little later. Returns the violations when the time is
    /// over.
    async fn until_true(
        &mut self,
        since: Instant,
        patience: Duration,
    ) -> Result<Option<Vec<Violation>>> {
        loop {
            let seen = self.read().await;
            let late = since.elapsed() >= patience;
            let watched = self.expected_state.violations();
            match seen {
                Ok(seen) => {
                    self.summary.checks += 1;
                    let mut found = judgement::judge(&self.expected_state.expected(), &seen);
                    found.extend(watched.iter().cloned());
                    if found.is_empty() {
                        self.true_after = since.elapsed();
                        return self.stays().await;
                    }
                    if late || !watched.is_empty() {
                        return Ok(Some(found));
                    }
                }
                Err(error) if late => return Err(error.context("the API servers don't respond")),
                Err(_) => {}
            }
            sleep(LOOK_EVERY).await;
        }
    }

    async fn stays(&mut self) -> Result<Option<Vec<Violation>>> {
        sleep(STAYS).await;
        let seen = eventually_within("another check", PEOPLE, async || {
            self.read().await.map(Some)
        })
        .await?;
        self.summary.checks += 1;
        let mut found = judgement::judge(&self.expected_state.expected(), &seen);
        found.extend(self.expected_state.violations());
        Ok(Some(found).filter(|found| !found.is_empty()))
    }

    async fn read(&self) -> Result<Snapshot> {
        let mut seen = Snapshot::default();
        for edge in Edge::ALL {
            let here = EdgeSeen::read(&self.stage.site(edge).client).await?;
            seen.edges.insert(edge, here);
        }
        snapshot::home(self.home, &mut seen).await?;
        seen.hubs = self.stage.hubs.leading().await;
        seen.holder = hubs::holder(self.home).await?;
        Ok(seen)
    }

    fn note(&mut self, line: &str) {
        // The timeline is for readers. Other writes report a full disk.
        writeln!(self.timeline, "{} {line}", jiff::Timestamp::now()).ok();
    }
}
