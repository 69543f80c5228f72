//! Questions to an agent: requests and answers are kept as payload stages.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use everbus::payloads::Stage;
use everbus::{Context, HandlerError, Payload, State};

use crate::events::{AgentError, AgentMetadata, AgentReply, AgentRequest, AgentResponse};

type Answered = Pin<Box<dyn Future<Output = Result<AgentReply, String>> + Send>>;

/// An agent: a function from a request to its answer.
#[derive(Clone)]
pub struct Agent {
    ask: Arc<dyn Fn(AgentRequest) -> Answered + Send + Sync>,
}

impl Agent {
    /// An agent whose answers come from this function.
    pub fn new<F>(ask: impl Fn(AgentRequest) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<AgentReply, String>> + Send + 'static,
    {
        Self {
            ask: Arc::new(move |request| Box::pin(ask(request))),
        }
    }

    /// The built-in agent: it repeats the question.
    pub fn echo() -> Self {
        Self::new(|request| async move {
            Ok(AgentReply {
                text: Some(format!("You said: {}", request.enriched_content)),
                ..AgentReply::default()
            })
        })
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Agent")
    }
}

/// Asks the agent. A failure publishes an event and is retried.
pub async fn answer(
    Payload(request): Payload<AgentRequest>,
    State(agent): State<Agent>,
    context: Context,
) -> Result<AgentResponse, HandlerError> {
    let (message_id, streaming) = (request.message_id.clone(), request.agent_config.streaming);
    context
        .store_payload(Stage::AGENT_REQUEST, &request)
        .await?;
    let began = Instant::now();
    match (agent.ask)(request).await {
        Ok(response) => {
            let stage = context.store_payload(Stage::AGENT_RESPONSE, &response);
            stage.status_code(200).await?;
            Ok(AgentResponse {
                message_id,
                response,
                metadata: AgentMetadata {
                    tokens_used: None,
                    latency_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
                    model: None,
                    streaming,
                },
            })
        }
        Err(error) => {
            let stage = context.store_payload(Stage::ERROR, &error);
            stage.error_details(error.clone()).await?;
            let failed = AgentError {
                message_id,
                error: error.clone(),
                retry_count: context.attempt() - 1,
                will_retry: context.attempt() < context.max_attempts(),
            };
            Err(HandlerError::new(error).with_event(failed))
        }
    }
}
