//! The command: runs the system, shows it at work, or publishes one message.

use std::error::Error;
use std::io::Read as _;
use std::path::PathBuf;

use clap::{Parser, Subcommand};
use everbus::{Clock as _, Cursor, SystemClock};
use omni::events::{
    AgentConfig, AgentRequest, MediaAttachment, MediaType, MessageContent, MessageReceived,
    MessageSending, Recipient, Sender,
};
use omni::{App, Settings, intake, sessions};
use serde_json::json;
use uuid::Uuid;

/// An omnichannel messaging system on Everbus.
#[derive(Debug, Parser)]
struct Arguments {
    /// The broker: a file by default, or the URL of a server.
    #[arg(long, default_value = "sqlite:omni.db")]
    broker: String,
    /// The store beside a broker that cannot be queried.
    #[arg(long)]
    store: Option<String>,
    /// The file with persons and accounts.
    #[arg(long, default_value = "omni-identities.db")]
    identities: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum Command {
    /// Handles events until Ctrl-C.
    Serve,
    /// Sends a few messages through the system and prints every event.
    Demo,
    /// Publishes a message.received, whose payload is read from standard input.
    Receive,
}

type Done = Result<(), Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Done {
    let arguments = Arguments::parse();
    let mut settings = Settings::new(&arguments.broker, &arguments.identities);
    settings.store.clone_from(&arguments.store);
    let app = App::start(settings).await?;
    match arguments.command {
        Command::Serve => {
            println!("omni handles events on {}", arguments.broker);
            tokio::signal::ctrl_c().await?;
        }
        Command::Demo => demo(&app).await?,
        Command::Receive => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text)?;
            let receipt = intake::receive(&app.bus, serde_json::from_str(&text)?).await?;
            println!("{}", receipt.id());
        }
    }
    app.bus.shutdown().await?;
    Ok(())
}

fn message(channel: &str, user: &str, phone: &str, text: &str) -> MessageReceived {
    MessageReceived {
        message_id: Uuid::now_v7().to_string(),
        external_message_id: Uuid::now_v7().to_string(),
        channel: channel.into(),
        instance_id: "instance-1".to_owned(),
        sender: Sender {
            platform_user_id: user.to_owned(),
            platform_username: None,
            profile_data: json!({ "phone": phone }).as_object().cloned(),
        },
        conversation_id: None,
        external_conversation_id: format!("conversation-{user}"),
        content: MessageContent::text(text),
        platform_timestamp: SystemClock.now(),
        raw_payload: Some(json!({ "body": text })),
    }
}

/// Two accounts with one phone number, a voice message whose processing fails once, a question and an answer.
async fn demo(app: &App) -> Done {
    let mut last = tail_start(app).await?;
    let first = message("whatsapp", "+49 170 1", "+49 170 1", "Hello");
    let mut second = message("telegram", "@ada", "+49 170 1", "It's me again");
    second.content.media = Some(vec![MediaAttachment {
        media_id: Uuid::now_v7().to_string(),
        media_type: MediaType::Audio,
        mime_type: "audio/ogg".to_owned(),
        size: None,
        url: Some("https://media.example/flaky-1.ogg".to_owned()),
        duration: Some(2.5),
        dimensions: None,
        filename: None,
        caption: None,
    }]);
    let question_id = second.message_id.clone();
    for message in [first, second] {
        intake::receive(&app.bus, message).await?;
    }
    let question = AgentRequest {
        message_id: question_id.clone(),
        person_id: "unknown".to_owned(),
        instance_id: "instance-1".to_owned(),
        enriched_content: "It's me again".to_owned(),
        history: None,
        agent_config: AgentConfig {
            api_url: "https://agent.example".to_owned(),
            timeout: 30_000,
            streaming: false,
        },
    };
    app.bus.publish(question).await?;
    let reply = MessageSending {
        message_id: Uuid::now_v7().to_string(),
        instance_id: "instance-1".to_owned(),
        channel: "telegram".into(),
        recipient: Recipient {
            platform_user_id: "@ada".to_owned(),
            conversation_id: None,
        },
        content: MessageContent::text("Welcome back"),
        reply_to: Some(question_id),
    };
    app.bus.publish(reply).await?;
    // The voice message comes last: its first attempt fails, and the second one waits two seconds.
    let mut processed = false;
    while !processed {
        let types = vec!["*".parse()?];
        let (records, next) = app.bus.log()?.read(last.clone(), types, 100).await?;
        for record in &records {
            let event = &record.event;
            let payload = String::from_utf8_lossy(event.payload());
            println!("{:<18} {payload}", event.event_type());
            processed |= event.event_type() == "media.processed";
        }
        if records.is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        last = next;
    }
    let (persons, accounts) = app.identities.count().await?;
    println!("{persons} person with {accounts} accounts");
    let kv = app.bus.kv(sessions::BUCKET)?;
    let session = sessions::find(&kv, &"telegram".into(), "conversation-@ada").await?;
    println!("session: {}", serde_json::to_string(&session)?);
    Ok(())
}

/// The end of the log before the demonstration.
async fn tail_start(app: &App) -> Result<Cursor, Box<dyn Error + Send + Sync>> {
    let types = vec!["*".parse()?];
    let mut cursor = Cursor::START;
    loop {
        let (records, next) = app.bus.log()?.read(cursor, types.clone(), 1000).await?;
        if records.is_empty() {
            return Ok(next);
        }
        cursor = next;
    }
}
